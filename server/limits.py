"""What one request may cost at most: the bounds of fields that no setting changes.

Each is a price: bytes, objects, sequences or tokens that a client may make a process hold or work
through. Bounds that operators set are in `server.config`, those of grammars in
`engine.shared.grammar_spec`. docs/security.md lists all of them.
"""

MAX_LENGTH_PENALTY = 10.0
MAX_BEAMS = 32
"""Beams of one search: each step asks for several times as many alternatives to each."""
MAX_BEAM_TOKENS = 2**16
"""Tokens of all beams of a request together, their prompts included: each step of a search hands
all of them to the engines again, whose caches are searched for them block by block."""
MAX_BEAM_CANDIDATES = 2**15
"""Next tokens that a step of all searches of a request chooses from."""
MAX_CHOICES = 128
"""`n` of a request: choices per prompt."""
MAX_PROMPTS = 2048
"""Prompts of a completion request."""
MAX_INPUT_TOKENS = 2**19
"""Tokens of all inputs of a request that gets vectors or scores."""
MAX_VECTOR_NUMBERS = 2**22
"""Numbers of all vectors of an answer."""
MAX_SEQUENCES = 2048
"""Sequences of a request: prompts times choices."""
MAX_TOKENS = 2**31 - 1
"""Of every field that counts tokens or names one; what a model takes is far less."""
MAX_COUNTED_TOKENS = 2**16
"""Tokens of a text that /tokenize shows, where the model does not hold more."""
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 256
"""Characters of a stop string: the end of the text is searched for each of them at each token."""
MAX_STOP_CHARACTERS = 4096
"""Characters of all stop strings of a request."""
MAX_STOP_SEARCHES = 2**13
"""Stop strings of a request times its sequences."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128
"""Characters of a word that the output must not contain."""
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_NAMED_TOKENS = 2**17
"""Token ids that the sampling fields of a request name (`stop_token_ids`, `logit_bias`,
`allowed_token_ids`, and those that spell its `bad_words`), times its sequences."""
MAX_ANSWER_TOKENS = 2**19
"""Tokens that a request may make: its sequences times `max_tokens`, with the prompts that the
answer repeats."""
MAX_SCORES = 2**17
"""Log probabilities that an answer may hold: of tokens and of the alternatives to them. Those of
a stream's output do not count, because they are gone once sent."""
MAX_SCORED_TOKENS = 1024
"""Token ids whose log probabilities a request names (`logprob_token_ids`)."""
MAX_SHARED = 2**23
"""Bytes of what a request says once and each of its conversations is rendered with."""
MAX_TEMPLATE = 2**16
"""Characters of a chat template that a request brings along."""
MAX_TEMPLATE_SECONDS = 2.0
"""Seconds that it may render."""
MAX_TEMPLATE_MEMORY = 2**29
"""Bytes of address space of the process that renders it."""
MAX_TEMPLATE_OUTPUT = 2**24
"""Characters that it may write."""
MAX_CHECK_SECONDS = 2.0
"""Seconds of processor time that a grammar may take to be checked."""
MAX_CHECK_MEMORY = 2**31
"""Bytes of address space of the process that checks large ones."""
MAX_JSON_VALUES = 270_000
"""Values and keys in a request body, and in the JSON texts in it: a prompt of 262,144 token ids
fits."""
MAX_JSON_CONTAINERS = 2**15
"""Arrays and objects among them."""
MAX_JSON_DEPTH = 100
"""Arrays and objects within each other."""
MAX_TEXT_LENGTH = 2**26
"""Characters of any text of a request for which nothing less is said."""
MAX_LIST_LENGTH = MAX_JSON_VALUES
"""Elements of any list for which nothing less is said."""
MAX_KEYS = 2**12
"""Keys of any object whose keys the client chooses."""
MAX_MESSAGES = 2048
"""Turns of a conversation, items of a response's input."""
MAX_PARTS = 1024
"""Parts of a message's content."""
MAX_TOOL_CALLS = 128
"""Calls in one turn of a conversation."""
MAX_NAME_LENGTH = 1024
"""Characters of what is a name: of a model, a user, a call."""
MAX_TOOLS = 1024
"""Tools that a request offers to the model."""
MAX_ECHO = 2**22
"""Characters of a conversation that the answers to it repeat."""
MAX_UNREAD = 2**18
"""Tokens and scores of a request that are kept for a client that does not read."""
MAX_UNSENT = 2**26
"""Bytes of large answers that a front end holds until their clients have read them."""
MAX_UNSENT_OF_ONE = MAX_UNSENT // 2
"""How many of them may be one tenant's."""
MAX_PIXEL_BYTES = 2**27
"""Bytes of pixels that a request hands to engines: of its images, as often as it has sequences."""
MAX_CACHE_SALT = 256
"""Characters of `cache_salt`."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""Range of seeds."""
MAX_KEPT_LENGTH = 2**22
"""Bytes of what a request goes on with: earlier responses, or a conversation."""
MAX_CHAIN = 1024
"""Kept responses that one goes on with."""
MAX_ADDED_ITEMS = 20
"""Items that one request adds to a conversation that is kept."""
MAX_LISTED = 100
"""Items of one page of a list."""
MAX_METADATA = 16
"""Keys of a kept conversation's metadata."""
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
"""Characters of a key, and of what it stands for."""
MAX_ERROR_LENGTH = 2000
"""Characters of an error's text, which may quote what the client sent."""
MAX_JOBS = 256
"""Responses that one front end makes at a time in the background."""
MAX_JOBS_OF_ONE = MAX_JOBS // 2
"""How many of them may be one tenant's."""
MAX_KEPT_EVENTS = 2**24
"""Bytes of the events that are kept of a response that is made in the background."""
MAX_KEPT_BATCHES = 32
"""Batches of kept events that are read at a time for one client."""
MAX_KEPT_ITEMS = 2048
"""Items of a conversation that is kept."""
