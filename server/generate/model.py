"""The served model as requests meet it, made once per process."""

import msgspec

from server.answer.formats import AnswerFormats
from server.generate.grammar_check import GrammarCheck
from server.pooling.model import PoolingModel
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer


class ServedModel(msgspec.Struct, frozen=True):
    """What specifications are made with."""

    tokenizer: ServedTokenizer
    formats: AnswerFormats
    """How the model writes reasoning and tool calls."""
    grammars: GrammarCheck
    templates: RequestTemplates | None
    """Renders templates of requests, where these are trusted."""
    pooling: PoolingModel | None = None
    """Of a model that makes vectors and generates nothing."""
