"""How a loop waits for what the receiver has put into its inbox."""

from queue import Empty, SimpleQueue

from engine.process.events import InboxItem


def receive(inbox: "SimpleQueue[InboxItem]", within: float) -> list[InboxItem]:
    """Wait for at most `within` seconds; return everything that has come, in order.

    Nobody else may take from the inbox.
    """
    items: list[InboxItem] = []
    if within > 0 and inbox.empty():
        try:
            items.append(inbox.get(timeout=within))
        except Empty:
            return items
    while not inbox.empty():  # cheaper than an exception in every step
        items.append(inbox.get_nowait())
    return items
