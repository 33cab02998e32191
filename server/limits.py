"""Fixed limits on the cost of one request, which no setting changes.

Each limits bytes, objects, sequences or tokens that a client can make a process store or process.
Limits that operators set are in `server.config`, those of grammars in
`engine.shared.grammar_spec`. docs/security.md lists those that bound a cost.
"""

MAX_LENGTH_PENALTY = 10.0
MAX_BEAMS = 32
"""Beams of one search: each step needs a multiple of that many alternatives for each."""
MAX_BEAM_TOKENS = 2**16
"""Tokens of all beams of a request together, including prompts: each step of a search resubmits
all of them to the engines, whose prefix caches are searched for them block by block."""
MAX_BEAM_CANDIDATES = 2**15
"""Candidate tokens of all searches of a request at each step."""
MAX_CHOICES = 128
"""`n` of a request: choices per prompt."""
MAX_PROMPTS = 2048
"""Prompts of a completion request."""
MAX_INPUT_TOKENS = 2**19
"""Input tokens of a pooling request."""
MAX_VECTOR_NUMBERS = 2**22
"""Total elements of all vectors in a response."""
MAX_SEQUENCES = 2048
"""Sequences of a request: prompts times choices."""
MAX_TOKENS = 2**31 - 1
"""Maximum of fields that are token counts or token IDs; models have far smaller limits."""
MAX_COUNTED_TOKENS = 2**16
"""Tokens of a text that /tokenize returns, unless the model's context is longer."""
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 256
"""Characters of a stop string: every string is searched for at each token."""
MAX_STOP_CHARACTERS = 4096
"""Characters of all stop strings of a request."""
MAX_STOP_SEARCHES = 2**13
"""Stop strings of a request times its sequences."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128
"""Characters of a bad word."""
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_NAMED_TOKENS = 2**17
"""Token IDs that a request's sampling fields specify (`stop_token_ids`, `logit_bias`,
`allowed_token_ids`, and those that spell its `bad_words`), times its sequences."""
MAX_ANSWER_TOKENS = 2**19
"""Tokens that a request can generate: its sequences times `max_tokens`, including echoed
prompts."""
MAX_SCORES = 2**17
"""Log probabilities in an answer: of tokens and of their alternatives. Those of a stream's output
do not count, because they are released once sent."""
MAX_SCORED_TOKENS = 1024
"""Token IDs in `logprob_token_ids` of a request."""
MAX_SHARED = 2**23
"""Bytes of data shared by all conversations of a request, with each of which it is rendered."""
MAX_TEMPLATE = 2**16
"""Characters of a chat template sent in a request."""
MAX_TEMPLATE_SECONDS = 2.0
"""Seconds for rendering it."""
MAX_TEMPLATE_MEMORY = 2**29
"""Bytes of address space of the process that renders it."""
MAX_TEMPLATE_OUTPUT = 2**24
"""Characters of its output."""
MAX_CHECK_SECONDS = 2.0
"""Seconds of processor time for checking a grammar."""
MAX_CHECK_MEMORY = 2**31
"""Bytes of address space of the process that checks it."""
MAX_JSON_VALUES = 270_000
"""Values and keys in a request body, and in the JSON texts in it: a prompt of 262,144 token ids
fits."""
MAX_JSON_CONTAINERS = 2**15
"""Arrays and objects among them."""
MAX_JSON_DEPTH = 100
"""Nesting depth of arrays and objects."""
MAX_TEXT_LENGTH = 2**26
"""Characters of any text in a request without a lower limit."""
MAX_LIST_LENGTH = MAX_JSON_VALUES
"""Elements of any list without a lower limit."""
MAX_KEYS = 2**12
"""Keys of any object with client-defined keys."""
MAX_MESSAGES = 2048
"""Turns of a conversation, or items of a response's input."""
MAX_PARTS = 1024
"""Parts of a message's content."""
MAX_TOOL_CALLS = 128
"""Calls in one turn of a conversation."""
MAX_NAME_LENGTH = 1024
"""Characters of a name: of a model, a user, a call."""
MAX_TOOLS = 1024
"""Tools in a request."""
MAX_ECHO = 2**22
"""Characters of a conversation that its answers repeat."""
MAX_UNREAD = 2**18
"""Tokens and scores of a request buffered for a client that does not read."""
MAX_UNSENT = 2**26
"""Bytes of large responses that a front end holds until their clients have read them."""
MAX_UNSENT_OF_ONE = MAX_UNSENT // 2
"""Maximum share of one tenant."""
MAX_PIXEL_BYTES = 2**27
"""Bytes of pixels that a request sends to engines: of its images, times its sequences."""
MAX_CACHE_SALT = 256
"""Characters of `cache_salt`."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
"""Range of seeds."""
MAX_STORED_LENGTH = 2**22
"""Bytes of stored data that a request continues: earlier responses, or a conversation."""
MAX_CHAIN = 1024
"""Stored responses in the chain that a response continues."""
MAX_ADDED_ITEMS = 20
"""Items that one request adds to a stored conversation."""
MAX_LISTED = 100
"""Items per page of a list."""
MAX_METADATA = 16
"""Keys in the metadata of a stored conversation."""
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
"""Characters of a key, and of a value."""
MAX_ERROR_LENGTH = 2000
"""Characters of an error message, which may quote the client's input."""
MAX_JOBS = 256
"""Responses that one front end generates concurrently in the background."""
MAX_JOBS_OF_ONE = MAX_JOBS // 2
"""Maximum share of one tenant."""
MAX_STORED_EVENTS = 2**24
"""Bytes of stored events of a background response."""
MAX_STORED_BATCHES = 32
"""Batches of stored events read at a time for one client."""
MAX_STORED_ITEMS = 2048
"""Items of a stored conversation."""
