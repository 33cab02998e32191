"""Requests: from front ends to engines."""

import msgspec

from engine.shared.messages.wire import Message

ROOT_SIZE = 16
"""Length in bytes of a root of the prefix cache (see `AddRequest.cache_root`)."""

UtilityValue = str | int | float | bool | None


class JsonSchemaGrammar(Message, frozen=True):
    """The output is a JSON value that fits a JSON schema."""

    schema: str
    """The schema as JSON text."""
    whitespace: str | None = None
    """Regular expression of what may stand between JSON tokens; empty: nothing; None: a little."""
    lenient: bool = False
    """Ignore keywords of the schema that cannot be enforced, instead of refusing them."""


class JsonObjectGrammar(Message, frozen=True):
    """The output is any JSON object; `whitespace` as for a schema."""

    whitespace: str | None = None


class RegexGrammar(Message, frozen=True):
    """The whole output matches a regular expression."""

    pattern: str


class ChoiceGrammar(Message, frozen=True):
    """The output is one of these texts."""

    choices: tuple[str, ...]


class LarkGrammar(Message, frozen=True):
    """The output follows a context-free grammar in llguidance's variant of Lark's syntax."""

    text: str


GrammarSpec = JsonSchemaGrammar | JsonObjectGrammar | RegexGrammar | ChoiceGrammar | LarkGrammar
"""What an output has to look like; `engine.grammar` says what is allowed in it."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the tokens of one request are drawn, after validation and defaults by the front end.

    `seed` is always set: a request that names none gets one at admission, because draws are a
    pure function of (seed, position) and must be repeatable on another engine. More than 15
    attributes: one for each parameter.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of alternatives reported beside each sampled token; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first; None reports nothing."""
    grammar: GrammarSpec | None = None
    """What the output has to look like."""
    grammar_after: str = ""
    """Text of the output after which the grammar applies (as at the end of a reasoning part);
    until then any text is allowed, but the request cannot end. Empty: from the beginning."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn; None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that never appear in the output: the last token of one is ruled out
    where those before it are the newest of the output."""
    grammar_opening: str = ""
    """With `grammar_after`: only an output that begins with this text goes on freely up to there;
    any other is in the grammar from its first token on. Empty: every output does."""
    grammar_budget: int = 0
    """With `grammar_after`: most tokens before that text, which is written then; 0: any number."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: the tokens that are reported beside each sampled one instead of the most
    likely, as many as `logprobs` says."""


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a request wants that gets a vector instead of tokens."""

    types_from: int = 0
    """Where in the prompt the second text of a pair begins, for models that tell them apart by
    token types; 0: there is one text, or they are not told apart."""
    dimensions: int = 0
    """Numbers of an embedding that are wanted, from the first on; 0: all."""
    activate: bool = True
    """Whether embeddings are normalized, or outputs become scores, as the model's files say.
    """
    per_token: bool = False
    """Each token gets a vector, one after the other, in place of one vector of all."""


MAX_ASPECT_RATIO = 200
"""Of the longer side of an image to the shorter: what Qwen's processor takes."""


class EncoderInput(Message, frozen=True):
    """An image, or a tile of one, and the tokens of a prompt that stand for it.

    The model's encoder makes one embedding for each of these tokens, which follow each other. To
    engines that resize (`EngineSetup.whole_images`) it is an image in the size that it has, and
    between the first and the last of its tokens there may be text, as there is between tiles.
    """

    position: int
    """Index of the first of these tokens in the prompt."""
    num_tokens: int
    digest: bytes
    """16 bytes that name the content, its shape and how it was prepared."""
    height: int
    width: int
    pixels: bytes
    """RGB, one byte each, row by row; neither rescaled nor normalized. Empty where the engine has
    them (`engine.shared.image_window`)."""


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """An engine that offers the KV blocks of a prompt: it has just computed them."""

    address: str
    """Of the socket where it is asked for them."""
    incarnation: int
    """Another process there knows nothing of them."""


class AddRequest(Message, frozen=True):
    """Queue one sequence for generation.

    `id` is unique among all requests of all front ends (a random base per front-end process);
    `request_id` is the client's name for it and is used in logs only. `output_token_ids` are
    tokens generated elsewhere before this engine took over: they are computed like a prompt but
    count as output for penalties, limits and draws.
    """

    id: int
    request_id: str
    front_end: int
    wave: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    priority: int = 0
    tenant: int = 0
    """Whose request it is: tenants share an engine fairly. 0 without tenants."""
    cache_root: bytes = b""
    """Where the chain of its KV blocks' names begins (`ROOT_SIZE` bytes): only requests with the
    same one find each other's prefixes. Empty: the common one."""
    alone: int = 0
    """It may be what killed engines: nobody else is computed beside it until so many of its own
    steps have ended well. 0: an ordinary request."""
    group: int = 0
    """Id of the first sequence of the client's request that this one is of: together they have one
    share of a step. 0: it is the first, or the only one."""
    pooling: PoolingParams | None = None
    """Nothing is generated: one vector is made of the prompt. None: tokens are drawn."""
    adapter: str = ""
    """Version of the adapter that it is computed with; empty: none."""
    encoder_inputs: list[EncoderInput] = []
    """What the prompt shows besides its text, by position; ranges do not overlap."""
    offers_blocks: bool = False
    """Another engine will read the KV blocks of its tokens: it is to find them."""
    kv_source: KvSource | None = None
    """Who offers the KV blocks of its tokens; whatever is not to be had there is computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first that is new."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class AbortRequests(Message, frozen=True):
    """Drop these requests at once; unknown ids are ignored."""

    ids: list[int]


class UtilityCall(Message, frozen=True):
    """Call an allow-listed engine utility by name; answered by `UtilityResult`."""

    call_id: int
    front_end: int
    name: str
    arguments: dict[str, UtilityValue] = {}


ALL_BLOCKS = -1
"""Stands for the number of changes of a front end that knows none of an engine's KV blocks."""


class KvBlocksWanted(Message, frozen=True):
    """A front end wants to know which KV blocks have come and gone since change number `after`.

    It is answered by one `KvBlocks`, as soon as there are any. A front end has one such question
    open; a later one replaces it.
    """

    front_end: int
    after: int
    """The newest change that it knows, or `ALL_BLOCKS`."""


CoreInput = AddRequest | AbortRequests | UtilityCall | KvBlocksWanted


class RouteTaken(Message, frozen=True):
    """A front end routes requests to the engine that asked on this connection."""

    session: int
    """That of the greeting."""


EngineInput = CoreInput | RouteTaken


class RouteHello(Message, frozen=True):
    """First message of an engine on a front end's request socket: the route is open.

    Repeated as a sign of life. `session` counts the engine's connections to front ends: a
    new one says that everything that was sent on the one before has been dropped. One that `asks`
    is answered with `RouteTaken` by a front end that can send requests to the engine already. One
    that `drains` gets no new requests: the coordinator, who says so too, may be away.
    """

    rank: int
    incarnation: int
    session: int = 0
    asks: bool = False
    drains: bool = False
