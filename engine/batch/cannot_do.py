"""How what an operator asked for is refused."""


class CannotDo(Exception):
    """What an operator asked for cannot be done, for the reason given; nothing has changed."""
