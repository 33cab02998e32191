"""`swell chat`: reads what the user says, shows what the model answers."""

import sys
from contextlib import ExitStack, suppress

import httpx
from rich.console import Console

from engine.shared.config import ModelConfig
from server.chat.config import ChatConfig, ChatSection
from server.chat.conversation import Conversation, ServerRefused, find_model, stream_answer
from server.fleet.own_server import OwnServer, ServerFailed, serve_arguments

HELP = """\
/clear          forget the conversation
/system TEXT    set the system prompt, and forget the conversation
/help           show this
/quit           leave (Ctrl-D does too)
Ctrl-C          stop the answer; leave, if none is coming"""


def chat(config: ChatConfig) -> int:
    """Converse until the user leaves; return the exit code."""
    notes = Console(stderr=True, highlight=False)
    settings = config.chat
    try:
        with ExitStack() as stack:
            url = settings.url.rstrip("/")
            if config.model.model != ModelConfig().model:
                with notes.status("starting a server"):
                    url = stack.enter_context(_own_server(config)).url
                if not settings.quick:
                    notes.print(f"serving at {url} as well; its status page is there")
            headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
            timeout = httpx.Timeout(settings.request_timeout, connect=10.0)
            client = stack.enter_context(
                httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
            )
            session = _Session(client, settings, notes)
            return session.quick(settings.quick) if settings.quick else session.converse()
    except (ServerFailed, ServerRefused) as error:
        print(f"swell chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _own_server(config: ChatConfig) -> OwnServer:
    return OwnServer(serve_arguments(config), config.supervisor.startup_timeout, config.chat.port)


class _Session:
    """One user at one terminal."""

    def __init__(self, client: httpx.Client, settings: ChatSection, notes: Console) -> None:
        self._client = client
        self._settings = settings
        self._notes = notes
        self._conversation = Conversation(settings.system_prompt)
        self._model = settings.model_name or find_model(client)
        self._is_terminal = sys.stdin.isatty()

    def quick(self, message: str) -> int:
        """Ask one thing and end."""
        self._conversation.say(message)
        self._answer()
        return 0

    def converse(self) -> int:
        """Take turns until the input ends."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its history and editing
            self._notes.print(f"You talk to {self._model}. /help lists commands.")
        while True:
            try:
                said = input("> " if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    print()
                return 0
            if said == "/quit":
                return 0
            if said.startswith("/"):
                self._command(said)
            elif said:
                self._turn(said)

    def _turn(self, said: str) -> None:
        self._conversation.say(said)
        try:
            self._answer()
        except ServerRefused as error:
            self._notes.print(f"[red]no answer:[/red] {error}", markup=True)

    def _command(self, said: str) -> None:
        word, _, rest = said.partition(" ")
        if word == "/clear":
            self._conversation.clear()
        elif word == "/system":
            self._conversation = Conversation(rest.strip() or None)
        elif word == "/help":
            self._notes.print(HELP)
        else:
            self._notes.print(f"there is no {word}; /help lists commands")

    def _answer(self) -> None:
        """Show the next answer as it comes; Ctrl-C stops it and keeps what there is."""
        text, thinking = "", False
        pieces = stream_answer(self._client, self._conversation.body(self._model, self._settings))
        try:
            for kind, piece in pieces:
                if kind == "reasoning":
                    thinking = True
                    self._notes.print(piece, style="dim", end="", markup=False)
                elif kind == "content":
                    if thinking:
                        thinking = False
                        self._notes.print()
                    text += piece
                    print(piece, end="", flush=True)
                elif piece == "length":
                    self._notes.print(" [the limit of tokens ends it]", style="dim", markup=False)
        except KeyboardInterrupt:
            if self._settings.quick:
                raise
            self._notes.print(" [stopped]", style="dim", markup=False)
        finally:
            pieces.close()
            self._conversation.answered(text)
            print(flush=True)
