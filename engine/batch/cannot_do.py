"""The error for operators' requests that cannot be carried out."""


class CannotDo(Exception):
    """An operator's request cannot be carried out, for the given reason; nothing has changed."""
