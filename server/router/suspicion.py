"""Which engines ended while a request was in flight on them, and what that says of the request."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.router.route import Engine

_NONE: frozenset[Engine] = frozenset()


@dataclass(slots=True, eq=False)
class Suspicion:
    """The deaths that one request may have been the reason for."""

    died_on: frozenset[Engine] = _NONE
    """Engines that died with the request in flight, for a reason that is not known."""
    in_doubt: frozenset[Engine] = _NONE
    """Engines that it was moved away from and that may have died."""
    silent_on: frozenset[Engine] = _NONE
    """Engines that fell silent with it in flight: they died if others take their places."""
    alone_on: Engine | None = None
    """The engine that said that it runs this request alone."""
    tried_on: Engine | None = None
    """The engine that it was last sent to, to run alone."""
    tries: int = 0
    """Engines that died, nobody knows why, while the request waited there to run alone."""
    deaths_alone: int = 0
    """Engines that died while they ran it alone."""
    clearances: int = 0
    """How often it has run alone and nothing happened."""

    def says(self) -> str:
        """Return what the client is told when the request ends for it."""
        deaths = len(self.died_on) + (self.alone_on is not None)
        if self.alone_on is not None:
            return (
                f"the request ended {deaths} engines, {self.deaths_alone} of them while it ran "
                "there alone: it must not be sent again"
            )
        return (
            f"the request was in flight on {deaths} engines that died and could not be run alone: "
            "it is suspected to be the reason and should not be sent again"
        )

    def left(self, engine: Engine, *, was_silent: bool) -> None:
        """The request leaves an engine that is out of reach."""
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.in_doubt |= {engine}

    def left_on(self, engine: Engine) -> bool:
        """Whether it left that engine without knowing what would become of it."""
        return engine in self.in_doubt or engine in self.silent_on

    def heard(self, engine: Engine) -> None:
        """An engine lives: it was only out of reach."""
        if not (self.died_on or self.in_doubt or self.silent_on):
            return
        if self.left_on(engine) and self.alone_on == engine:
            self.alone_on = None
        self.excused(engine)
        self.died_on -= {engine}

    def excused(self, engine: Engine) -> None:
        """Whatever happened to an engine, it was not this request."""
        self.in_doubt -= {engine}
        self.silent_on -= {engine}

    def ended(self, engine: Engine, *, was_silent: bool) -> None:
        """An engine has gone; one that had been silent may be back some day."""
        self.excused(engine)
        if was_silent:
            self.silent_on |= {engine}
        else:
            self.died_on |= {engine}
        if engine == self.tried_on and not was_silent:
            self.tries += 1
            self.tried_on = None

    def replaced(self, incarnations: Mapping[int, int]) -> None:
        """Engines that fell silent have died if other processes are in their places."""
        for rank, incarnation in self.silent_on:
            if incarnations.get(rank, incarnation) != incarnation:
                self.ended((rank, incarnation), was_silent=False)

    def explained(self, deaths: frozenset[Engine]) -> None:
        """Another request is the reason for these deaths."""
        self.died_on -= deaths

    def cleared(self) -> None:
        """It has run alone, and nothing happened: what died did so for other reasons."""
        self.died_on = _NONE
        self.alone_on = self.tried_on = None
        self.tries = self.deaths_alone = 0
        self.clearances += 1
