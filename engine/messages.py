"""Every message that crosses a process boundary, one tagged union per direction.

All messages are `msgspec` Structs, tagged, `array_like` and encoded as msgpack, so a message is
a short array whose first element names its type. Decoding is typed: a malformed or foreign
message raises `msgspec.DecodeError`, which the receiver counts, logs once and drops.

Directions, by socket (binder first):

| socket         | type                              | down            | up                |
|----------------|-----------------------------------|-----------------|-------------------|
| registration   | ROUTER coordinator / DEALER all   | `CoordinatorReply` | `MemberMessage` |
| front publish  | XPUB coordinator / XSUB front ends | `ClusterView`   | `FrontEndNotice`  |
| back output    | PULL coordinator / PUSH engines   |                 | `EngineReport`    |
| back publish   | XPUB coordinator / XSUB engines   | `GroupOrder`    |                   |
| requests       | ROUTER front end / DEALER engine  | `EngineInput`   | `EngineGreeting`  |
| outputs        | PULL front end / PUSH engine      |                 | `EngineOutput`    |
| control        | ROUTER supervisor / DEALER front ends | `ControlStatus` | `ControlRequest` |
"""

from typing import Literal

import msgspec

from engine.reach import EVERYTHING, Reach


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all wire messages: frozen, tagged with the class name, encoded as an array."""


UtilityValue = str | int | float | bool | None

# -- requests: front end -> engine ---------------------------------------------------------------


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
    pure function of (seed, position) and must be repeatable on another engine.
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


EngineInput = AddRequest | AbortRequests | UtilityCall


class EngineGreeting(Message, frozen=True):
    """First message of an engine on a front end's request socket: the route is open.

    Repeated as a sign of life. `session` counts the engine's connections to front ends: a
    new one says that everything that was sent on the one before has been dropped.
    """

    rank: int
    incarnation: int
    session: int = 0


# -- outputs: engine -> front end ----------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one chosen token with its alternatives, best first."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


FinishReason = Literal["stop", "length", "abort", "error"]


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request."""

    id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the request when `finish_reason` is "stop"."""
    logprobs: list[TokenLogprob] | None = None
    """One per element of `token_ids` when asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One per prompt token but the first, on the first output, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache (on the first output)."""
    error: str | None = None
    """What went wrong when `finish_reason` is "error"."""


class Received(msgspec.Struct, frozen=True, array_like=True):
    """What an engine had received from one front-end process, and made for it, as of its stats.

    `front_end_incarnation` tells a restarted front end from its predecessor. The counts only grow.
    `prompt_tokens` counts whatever has to be computed first: for a request that another engine
    began, its tokens so far too.
    """

    front_end: int
    front_end_incarnation: int
    requests: int
    prompt_tokens: int
    outputs: int = 0
    """Messages with outputs that were made for it, the one that carries these stats included."""


class EngineStats(Message, frozen=True):
    """One engine's load and counters, stamped with (incarnation, wave, step).

    Gauges are the state after `step`; `*_total` fields are counts since the engine started.
    `version` grows with every stats an engine takes, so that of two stats with the same
    incarnation the larger version is the newer, also while no step is taken.
    """

    rank: int
    incarnation: int
    version: int
    wave: int
    step: int
    waiting: int
    running: int
    kv_usage: float
    """Share of KV blocks in use by live requests, 0 to 1."""
    queued_prefill_tokens: int
    """Prompt tokens received and not yet computed (waiting requests and partial prefills)."""
    received: list[Received] = []
    prefix_cache_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits_total: int = 0
    """Prompt tokens found there."""
    preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    dummy_steps_total: int = 0
    topology: int = 0
    """Which formation of its lockstep group the engine belongs to; only grows."""
    wave_running: bool = False
    """Whether the engine's lockstep group runs `wave`; unused by independent engines."""
    hold_epoch: int = 0
    """Newest hold that the engine knows of; odd means held (see `engine.lockstep.wave`)."""
    halted: bool = False
    """Paused or asleep by an operator's order: requests wait, and no progress is due."""
    spec_drafts_total: int = 0
    """Times that tokens of a request were guessed (see `--speculative-ngram`)."""
    spec_draft_tokens_total: int = 0
    """Tokens guessed."""
    spec_accepted_tokens_total: int = 0
    """Guessed tokens that were right."""
    grammar_requests_total: int = 0
    """Requests held to a grammar."""
    grammar_waits_total: int = 0
    """Those of them whose grammar had to be compiled first."""


class StepOutputs(Message, frozen=True):
    """All outputs of one step that belong to one front end, with the engine's stats."""

    stats: EngineStats
    outputs: list[RequestOutput]


class UtilityResult(Message, frozen=True):
    """Answer to a `UtilityCall`: a JSON-like result, or an error that says what to do."""

    call_id: int
    rank: int
    result: UtilityValue | dict[str, UtilityValue] = None
    error: str | None = None


class EngineDead(Message, frozen=True):
    """Last words of an engine that cannot go on."""

    rank: int
    incarnation: int
    reason: str


EngineOutput = StepOutputs | UtilityResult | EngineDead


# -- registration: everybody <-> coordinator ------------------------------------------------------

MemberKind = Literal["engine", "front_end"]


class EngineSetup(msgspec.Struct, frozen=True, array_like=True):
    """What an engine found out while it set itself up."""

    num_kv_blocks: int
    block_size: int
    max_model_len: int
    model_fingerprint: str
    """Equal on all engines that hold the same weights."""
    max_num_seqs: int = 0
    """Most sequences that the engine runs at once; 0 if it does not say."""


class FrontEndAddresses(msgspec.Struct, frozen=True, array_like=True):
    """Where engines reach one front end."""

    requests: str
    outputs: str


class GroupMember(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One engine process of a lockstep group."""

    rank: int
    incarnation: int


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine stands with its lockstep group, as it says itself.

    See `engine.lockstep.seat`.
    """

    state: Literal["apart", "preparing", "prepared", "joined"]
    topology: int
    """Newest formation that it heard of: the one it left, prepares for or is in."""
    address: str
    """HOST:PORT where it would host the meeting point of a group that it leads."""
    members: list[GroupMember] = []
    """Whom it is in a group with, itself included; empty unless joined."""


class Hello(Message, frozen=True):
    """A process asks to join (or joins again after the coordinator restarted).

    `host` is the name of its node.
    `incarnation` is a random number drawn once per process. `index` is the rank or front-end
    number, or -1 to be given one. `group_config` holds the settings that must be equal on all
    engines, as text, so that a refusal can name the one that differs. The key "lockstep" with the
    value "true" says that the engines step together and need waves; "data_parallel_size" then says
    how many form the first group and "regroup" what happens when one of them dies.
    """

    kind: MemberKind
    index: int
    incarnation: int
    host: str
    pid: int
    group_config: dict[str, str] = {}
    addresses: FrontEndAddresses | None = None
    wave: int = 0
    """The wave an engine that joins again was in; a coordinator takes the maximum it sees."""
    reach: Reach = EVERYTHING
    """The engines that a front end routes to."""


class Ready(Message, frozen=True):
    """The member has set itself up and takes part; repeated as its heartbeat from then on."""

    kind: MemberKind
    index: int
    incarnation: int
    setup: EngineSetup | None = None
    seat: Seat | None = None


class Heartbeat(Message, frozen=True):
    """The member is alive and still setting itself up; answered by `HeartbeatAck`."""

    kind: MemberKind
    index: int
    incarnation: int
    seat: Seat | None = None


class Goodbye(Message, frozen=True):
    """The member leaves on purpose, or its supervisor saw it die.

    An `index` of -1 stands for whatever number the coordinator gave to this incarnation.
    """

    kind: MemberKind
    index: int
    incarnation: int


class Draining(Message, frozen=True):
    """The member finishes what it has and wants nothing new; its heartbeat until the goodbye."""

    kind: MemberKind
    index: int
    incarnation: int
    seat: Seat | None = None


MemberMessage = Hello | Ready | Heartbeat | Draining | Goodbye


class FrontEndEntry(msgspec.Struct, frozen=True, array_like=True):
    """One front end as engines need to know it."""

    index: int
    incarnation: int
    addresses: FrontEndAddresses
    reach: Reach = EVERYTHING


class Welcome(Message, frozen=True):
    """The coordinator accepts a member and tells it where everything is."""

    epoch: int
    """Random number of this coordinator process: a change means that it restarted."""
    index: int
    wave: int
    publish_address: str
    """Front publish for front ends, back publish for engines."""
    output_address: str
    """Back output for engines; empty for front ends."""
    front_ends: list[FrontEndEntry] = []


class Refused(Message, frozen=True):
    """The member may not join; `field` names the setting that differs, if that is why.

    A refusal that is not final may be lifted soon (the rank's last holder is not known to be
    dead yet): the member keeps asking.
    """

    reason: str
    field: str | None = None
    final: bool = True


class HeartbeatAck(Message, frozen=True):
    """Answer to a heartbeat; `known` is False when the member has to say HELLO again."""

    epoch: int
    known: bool


CoordinatorReply = Welcome | Refused | HeartbeatAck


# -- back publish: coordinator -> engines --------------------------------------------------------


class FrontEnds(Message, frozen=True):
    """The front ends that are there now; engines connect to new ones and drop the others."""

    epoch: int
    front_ends: list[FrontEndEntry]


class StartDpWave(Message, frozen=True):
    """Paused engines of the group start stepping.

    `excluded_rank` already knows (it was sent the request): an optimization only, -1 for none.
    Held engines obey only a `hold_epoch` that is newer than theirs.
    """

    wave: int
    excluded_rank: int
    hold_epoch: int = 0
    topology: int = 0


class FormGroup(Message, frozen=True):
    """The engines that hold collectives together from now on; `topology` only grows.

    Without an address: leave the group before it, if any, and prepare for this one. With an
    address, which comes when all members have prepared: meet there.
    """

    topology: int
    members: list[GroupMember]
    """By position in the group, the leader first."""
    address: str = ""


GroupOrder = FrontEnds | StartDpWave | FormGroup


# -- back output: engines -> coordinator ---------------------------------------------------------


class WaveComplete(Message, frozen=True):
    """Rank 0 of a lockstep group: nobody has work, the group paused at the end of `wave`.

    With an odd `hold_epoch` the group is held: only a newer hold epoch makes it run again.
    """

    rank: int
    incarnation: int
    wave: int
    hold_epoch: int = 0
    topology: int = 0


class StartWave(Message, frozen=True):
    """An engine runs `wave` from now on: its peers have to run too.

    Every engine of a lockstep group says so when it starts, whatever made it start, so that the
    coordinator knows who follows. Told again while nobody joins.
    """

    rank: int
    incarnation: int
    wave: int
    hold_epoch: int = 0
    topology: int = 0


EngineReport = EngineStats | WaveComplete | StartWave


# -- front publish: coordinator <-> front ends ---------------------------------------------------


class EngineEntry(msgspec.Struct, frozen=True, array_like=True):
    """One engine in the cluster view. `stats` is None until its first report."""

    rank: int
    incarnation: int
    ready: bool
    host: str
    restarts: int
    """How many earlier incarnations of this rank the coordinator has seen."""
    setup: EngineSetup | None
    stats: EngineStats | None


class ClusterView(Message, frozen=True):
    """The whole state of the cluster as the coordinator knows it.

    `version` grows with every publication of one epoch.
    """

    epoch: int
    version: int
    wave: int
    running: bool
    engines: list[EngineEntry]
    num_front_ends: int
    wakeups_total: dict[str, int] = {}
    """How often the engines were woken, by source: "front_end" or "engine"."""


class WakeUp(Message, frozen=True):
    """A front end sent a request to `rank` while its view said paused in `wave`."""

    front_end: int
    rank: int
    wave: int


FrontEndNotice = WakeUp


# -- supervisor <-> its children (local socket pair) ---------------------------------------------


class ChildProgress(Message, frozen=True):
    """What a starting child is doing now, for the progress display."""

    phase: str


class ChildReady(Message, frozen=True):
    """The child serves. `detail` is one line for people."""

    detail: str
    addresses: dict[str, str] = {}


class ChildFailed(Message, frozen=True):
    """The child cannot start, and starting it again would not help."""

    reason: str


ChildStatus = ChildProgress | ChildReady | ChildFailed


# -- front end <-> supervisor (control socket of one node) -----------------------------------------


class ScaleEngines(Message, frozen=True):
    """Run so many engines from now on."""

    data_parallel_size: int


class RestartEngines(Message, frozen=True):
    """Replace every engine, one after the other."""


class ControlQuery(Message, frozen=True):
    """Ask for the present state only."""


ControlRequest = ScaleEngines | RestartEngines | ControlQuery


class ControlStatus(Message, frozen=True):
    """The engines of the node as its supervisor sees them; the answer to every request."""

    data_parallel_size: int
    """How many engines there shall be."""
    engines: dict[str, str]
    """Phase of each engine by rank: "ready", "retiring", or what it does while it starts."""
    busy: bool
    """Whether engines are being added, retired or replaced."""
    error: str | None = None
    """Why the last change was not carried out."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the wire form of a message."""
    return _encoder.encode(message)
