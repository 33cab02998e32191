"""The served model as requests meet it, made once per process."""

import msgspec

from server.answer.formats import AnswerFormats
from server.generate.grammar_check import GrammarCheck
from server.text.tokenizer import ServedTokenizer


class ServedModel(msgspec.Struct, frozen=True):
    """What specifications are made with."""

    tokenizer: ServedTokenizer
    formats: AnswerFormats
    """How the model writes reasoning and tool calls."""
    grammars: GrammarCheck
