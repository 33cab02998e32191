"""Child process that checks grammars: `python -m server.generate.grammar_process`."""

import signal

import msgspec

from engine.shared.grammar_spec import BadGrammar, GrammarThreads, check_grammar, lark_from_ebnf
from engine.shared.messages import GrammarSpec, LarkGrammar
from server.helper_process import serve
from server.limits import MAX_CHECK_MEMORY, MAX_CHECK_SECONDS


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Job: check whether a grammar can be enforced."""

    spec: GrammarSpec
    special_tokens: tuple[str, ...] = ()


class GrammarText(msgspec.Struct, frozen=True, tag="text"):
    """Job: convert a client's grammar, in Lark or GBNF syntax."""

    text: str


class JobResult(msgspec.Struct, frozen=True):
    """The result of a job."""

    error: str | None = None
    """Why the grammar cannot be enforced."""
    lark: str = ""


def _run_job(job: Check | GrammarText) -> JobResult:
    try:
        match job:
            case Check(spec, special_tokens):
                return JobResult(check_grammar(spec, special_tokens))
            case GrammarText(text):
                return JobResult(lark=lark_from_ebnf(text))
    except BadGrammar as error:
        return JobResult(str(error))
    except MemoryError:
        return JobResult("the grammar takes too much memory to check; make it simpler")


NOTHING = msgspec.msgpack.encode(Check(LarkGrammar('start: "a"')))
"""A job that makes the process import what it needs."""

if __name__ == "__main__":
    threads = GrammarThreads(1, "grammar check")
    decode = msgspec.msgpack.Decoder(Check | GrammarText).decode

    def answer(job: bytes) -> bytes:
        """Run a job with a deep stack."""
        return msgspec.msgpack.encode(threads.submit(_run_job, decode(job)).result())

    serve(answer, MAX_CHECK_MEMORY, MAX_CHECK_SECONDS, signal.ITIMER_PROF)
