"""How a loop waits for what the receiver has put into its inbox."""

from queue import Empty, SimpleQueue

from engine.process.events import InboxItem


def receive(inbox: "SimpleQueue[InboxItem]", within: float) -> list[InboxItem]:
    """Wait for at most `within` seconds; return everything that has come, in order."""
    items = []
    try:
        items.append(inbox.get(within > 0, within))
        while True:
            items.append(inbox.get_nowait())
    except Empty:
        return items
