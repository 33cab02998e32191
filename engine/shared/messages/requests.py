"""Requests: from front ends to engines."""

import msgspec

from engine.shared.messages.wire import Message

ROOT_SIZE = 16
"""Length in bytes of a root of the prefix cache (see `AddRequest.cache_root`)."""

UtilityValue = str | int | float | bool | None


class JsonSchemaGrammar(Message, frozen=True):
    """The output is a JSON value that satisfies a JSON schema."""

    schema: str
    """The schema as JSON text."""
    whitespace: str | None = None
    """Regular expression of whitespace between JSON tokens; empty: none; None: the default."""
    lenient: bool = False
    """Ignore keywords of the schema that cannot be enforced, instead of rejecting them."""


class JsonObjectGrammar(Message, frozen=True):
    """The output is any JSON object; `whitespace` as for a schema."""

    whitespace: str | None = None


class RegexGrammar(Message, frozen=True):
    """The entire output matches a regular expression."""

    pattern: str


class ChoiceGrammar(Message, frozen=True):
    """The output is one of these texts."""

    choices: tuple[str, ...]


class LarkGrammar(Message, frozen=True):
    """The output follows a context-free grammar in llguidance's variant of Lark's syntax."""

    text: str


GrammarSpec = JsonSchemaGrammar | JsonObjectGrammar | RegexGrammar | ChoiceGrammar | LarkGrammar
"""Constraint on an output; `engine.grammar` defines the limits."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling parameters of one request, validated and with defaults applied by the front end.

    `seed` is always set: a request without one gets one at admission, because sampling is a pure
    function of (seed, position) and must be repeatable on another engine. More than 15 attributes:
    one for each parameter.
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
    """Number of alternatives reported per sampled token; None: no log probabilities."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    grammar: GrammarSpec | None = None
    """Constraint on the output."""
    grammar_after: str = ""
    """Output text after which the grammar applies (such as the end of a reasoning part). Until then
    any text is allowed, but the request cannot end. Empty: from the beginning."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that can be sampled; None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never appear in the output: a sequence's last token is masked where its
    other tokens are the newest of the output."""
    grammar_opening: str = ""
    """With `grammar_after`: only an output that begins with this text is unconstrained up to that
    marker; otherwise the grammar applies from the first token. Empty: every output is."""
    grammar_budget: int = 0
    """With `grammar_after`: maximum tokens before the marker is forced; 0: no limit."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: the tokens reported instead of the most likely ones; as many as
    `logprobs`."""
    seed_given: bool = True
    """Whether the client set the seed; engines for which seeds are costly ignore generated ones."""


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Parameters of a request that returns a vector instead of tokens."""

    types_from: int = 0
    """Prompt index at which a pair's second text begins, for models that distinguish them by token
    types; 0: a single text, or no token types."""
    dimensions: int = 0
    """Number of leading embedding dimensions to return; 0: all."""
    activate: bool = True
    """Whether to normalize embeddings, or convert outputs to scores, as the model's files specify.
    """
    per_token: bool = False
    """Return one vector per token, concatenated, instead of one for the sequence."""


MAX_ASPECT_RATIO = 200
"""Maximum ratio of an image's longer to its shorter side; the limit of Qwen's processor."""

WHOLE_PATCHES = {"clip_vision_model": "default", "siglip_vision_model": "full"}
"""Values of LLaVA's `vision_feature_select_strategy` with which each patch of a square image is a
token: CLIP has a class embedding, which is left out, SigLIP none."""


class EncoderInput(Message, frozen=True):
    """An image, or a tile of one, and its placeholder tokens in a prompt.

    The model's encoder produces one embedding per token; the tokens are contiguous. For engines
    with `EngineSetup.whole_images` it is the whole image at its own size, and `num_tokens` spans
    from its first to its last placeholder token, including text between tiles.
    """

    position: int
    """Index of the first placeholder token in the prompt."""
    num_tokens: int
    digest: bytes
    """16-byte hash of the content, its shape and its preprocessing."""
    height: int
    width: int
    pixels: bytes
    """RGB, uint8, row-major, at the encoder's input size (whole images: at their own); neither
    rescaled nor normalized. Empty if the engine holds them (`engine.shared.image_window`)."""


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """An engine that has computed a prompt and offers its KV blocks."""

    address: str
    """Address of the socket that serves them."""
    incarnation: int
    """Another incarnation at that address does not have them."""


class AddRequest(Message, frozen=True):
    """Queue one sequence for generation.

    `id` is unique among all requests of all front ends (a random base per front-end process);
    `request_id` is the client's id, used only in logs. `output_token_ids` are tokens that another
    engine generated before this one took over: they are computed like a prompt but count as output
    for penalties, limits and sampling.
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
    """Tenants share an engine fairly. 0 without tenants."""
    cache_root: bytes = b""
    """Root of its chain of KV block names (`ROOT_SIZE` bytes): only requests with the same root
    share prefixes. Empty: the default root."""
    exclusive_steps: int = 0
    """Number of its own steps that have to succeed before other requests are batched with it, as it
    is suspected of killing engines. 0: an ordinary request."""
    group: int = 0
    """Id of the first sequence of the client's request: its sequences together get one share of a
    step. 0: this is the first, or the only one."""
    pooling: PoolingParams | None = None
    """Return one vector for the prompt and generate nothing. None: generate."""
    adapter: str = ""
    """Version of the adapter to use; empty: none."""
    encoder_inputs: list[EncoderInput] = []
    """Images in the prompt, by position; ranges do not overlap."""
    offers_blocks: bool = False
    """Keep the KV blocks of its tokens available for another engine to read."""
    kv_source: KvSource | None = None
    """Engine that offers the KV blocks of its tokens; missing ones are computed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute before the first new token."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class AbortRequests(Message, frozen=True):
    """Drop these requests immediately; unknown ids are ignored."""

    ids: list[int]


class UtilityCall(Message, frozen=True):
    """Call an allow-listed engine utility by name; answered by `UtilityResult`."""

    call_id: int
    front_end: int
    name: str
    arguments: dict[str, UtilityValue] = {}


ALL_BLOCKS = -1
"""Value of `after` from a front end that knows none of an engine's KV blocks."""


class KvBlocksQuery(Message, frozen=True, tag="KvBlocksWanted"):
    """A front end requests the changes of an engine's KV blocks since change number `after`.

    Answered by one `KvBlocks` once there are any. A front end has one such request pending; a later
    one replaces it.
    """

    front_end: int
    after: int
    """The newest change known, or `ALL_BLOCKS`."""


CoreInput = AddRequest | AbortRequests | UtilityCall | KvBlocksQuery


class RouteTaken(Message, frozen=True):
    """A front end accepts the connection on which the engine sent `RouteHello.wants_reply`."""

    session: int
    """Copied from the `RouteHello`."""


EngineInput = CoreInput | RouteTaken


class RouteHello(Message, frozen=True):
    """First message of an engine on a front end's request socket: the route is open.

    Repeated as a keep-alive. `session` counts the engine's connections to front ends: a new one
    means that everything sent on the previous one was dropped. If it has `wants_reply`, a front end
    that can already send requests to the engine answers with `RouteTaken`. An engine that `drains`
    gets no new requests; it is sent here as well because the coordinator may be unavailable.
    """

    rank: int
    incarnation: int
    session: int = 0
    wants_reply: bool = False
    drains: bool = False
