"""Every error a user can meet, in one tree, named by whose fault it is; other modules raise, nobody redefines them.

Each class carries what the edges need: a stable ``code`` for machines, the process ``exit_code``, and the
``blame`` that tells a scheduler what to do (refuse the job, try another node, try again). The wire's
status codes are derived from it in one table, ``fedeval.wire.status``.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Blame(Enum):
    """Whose fault an error is, hence what to do about it."""

    JOB = "job"  #: wrong wherever it runs: refuse or fail the job
    NODE = "node"  #: this node cannot; another one may
    SHARD = "shard"  #: running this shard failed; counts as one of its tries
    CALLER = "caller"  #: the command or call was wrong; nothing was changed
    SYSTEM = "system"  #: the environment of this process is broken


class FedevalError(Exception):
    """Root of the tree; never raised itself. Its text is one line: what is wrong, where, what to write instead."""

    code: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1
    blame: ClassVar[Blame] = Blame.SYSTEM

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


# ---------------------------------------------------------------- the job is wrong


class JobError(FedevalError):
    """The job as submitted cannot give a number, on any node."""

    code = "JOB_INVALID"
    exit_code = 10
    blame = Blame.JOB


class SpecError(JobError):
    """The job file is not valid: a key, a type, a value."""

    code = "SPEC_INVALID"
    exit_code = 11


class ModelNotFound(FedevalError):
    """No model at the path or id named, as seen from this node."""

    code = "MODEL_NOT_FOUND"
    exit_code = 12
    blame = Blame.NODE


class ModelCorrupt(JobError):
    """The model's files are truncated, incomplete or not what they claim to be."""

    code = "MODEL_CORRUPT"
    exit_code = 13


class ModelNotFinite(JobError):
    """A weight is NaN or infinite."""

    code = "MODEL_NOT_FINITE"
    exit_code = 14


class ModelNeedsCode(JobError):
    """The model asks for code from its repository to be run, which is never done."""

    code = "MODEL_NEEDS_CODE"
    exit_code = 15


class ModelUnsupported(JobError):
    """The model or its tokenizer lacks something scoring needs."""

    code = "MODEL_UNSUPPORTED"
    exit_code = 16


class ContextTooLong(JobError):
    """The window's context is beyond what the model was made for."""

    code = "CONTEXT_TOO_LONG"
    exit_code = 17


class PrecisionUnsupported(JobError):
    """The precision asked for does not run, or not sensibly, on this device."""

    code = "PRECISION_UNSUPPORTED"
    exit_code = 18
    blame = Blame.NODE


class PrecisionInfeasible(JobError):
    """No choice of formats keeps the budget, or was shown to keep the limit on perplexity."""

    code = "PRECISION_INFEASIBLE"
    exit_code = 19


class DatasetNotFound(FedevalError):
    """No data at the path or id named, as seen from this node."""

    code = "DATASET_NOT_FOUND"
    exit_code = 20
    blame = Blame.NODE


class DatasetEmpty(JobError):
    """The dataset has no document, or none that yields a token to score."""

    code = "DATASET_EMPTY"
    exit_code = 21


class DatasetMalformed(JobError):
    """A file of the dataset cannot be read as what it is declared to be; the text names file and line or byte."""

    code = "DATASET_MALFORMED"
    exit_code = 22


class DataChanged(FedevalError):
    """The data, tokenizer or weights on this node differ from those the job was planned with."""

    code = "DATA_CHANGED"
    exit_code = 23
    blame = Blame.NODE


class PathRefused(FedevalError):
    """A path in the job lies outside the roots this node was told to read."""

    code = "PATH_REFUSED"
    exit_code = 24
    blame = Blame.NODE


class LayoutUnsupported(FedevalError):
    """The job's parallel layout does not fit the ranks or the model of this node's group."""

    code = "LAYOUT_UNSUPPORTED"
    exit_code = 25
    blame = Blame.NODE


# ---------------------------------------------------------------- running a shard went wrong


class ShardError(FedevalError):
    """Scoring one shard failed on this node."""

    code = "SHARD_FAILED"
    exit_code = 30
    blame = Blame.SHARD


class LossOutOfBounds(ShardError):
    """A document part's loss sum is beyond what a float64 holds exactly (2^23 nats)."""

    code = "LOSS_OUT_OF_BOUNDS"


class OutOfMemory(ShardError):
    """The device had no room for the shard's batches."""

    code = "OUT_OF_MEMORY"


class WorkerCrashed(ShardError):
    """The worker process died while it scored the shard."""

    code = "WORKER_CRASHED"


class RankLost(WorkerCrashed):
    """A rank of the local group died, hung or lost its link while the group scored; the group is dissolved."""

    code = "RANK_LOST"


class WorkerHung(ShardError):
    """The worker process made no progress for longer than it may."""

    code = "WORKER_HUNG"


class JobIncomplete(FedevalError):
    """The job ended without a number: something is missing, and the report says what."""

    code = "JOB_INCOMPLETE"
    exit_code = 1
    blame = Blame.JOB


# ---------------------------------------------------------------- the call was wrong


class CallError(FedevalError):
    """A command or an RPC was refused; nothing was changed."""

    code = "REFUSED"
    exit_code = 2
    blame = Blame.CALLER


class RequestInvalid(CallError):
    """A field of a request is missing or wrong; the text names it."""

    code = "REQUEST_INVALID"


class UnknownJob(CallError):
    """No job of that id or name."""

    code = "UNKNOWN_JOB"


class JobKeyConflict(CallError):
    """The client key was used before with another specification."""

    code = "JOB_KEY_CONFLICT"


class StaleIncarnation(CallError):
    """The caller is an earlier life of an agent that has registered again since; it must stop."""

    code = "STALE_INCARNATION"


class NotRegistered(CallError):
    """The coordinator does not know this agent (it restarted, or declared the agent lost): register again."""

    code = "NOT_REGISTERED"


class VersionRefused(CallError):
    """No protocol version is spoken by both sides."""

    code = "VERSION_REFUSED"


class PlanRefused(CallError):
    """The parts of a plan contradict each other or are too many."""

    code = "PLAN_REFUSED"


class PartialRefused(CallError):
    """A partial is not on the grid, not finite, out of bounds or does not fit the shard's plan."""

    code = "PARTIAL_REFUSED"


class AccessError(CallError):
    """The caller is not who may do this; no other try will change that. Never raised itself."""

    code = "ACCESS_REFUSED"
    exit_code = 50


class Unauthenticated(AccessError):
    """The caller shows no token or certificate that this coordinator knows."""

    code = "UNAUTHENTICATED"


class NotPermitted(AccessError):
    """The caller's role does not allow the call, or it speaks in another's name."""

    code = "NOT_PERMITTED"
    exit_code = 51


class Revoked(AccessError):
    """The caller's certificate was revoked."""

    code = "REVOKED"
    exit_code = 52


class CertificateExpired(AccessError):
    """A certificate has expired, or is not valid yet by the clock of who reads it."""

    code = "CERTIFICATE_EXPIRED"
    exit_code = 53


class PlainText(AccessError):
    """One side speaks TLS and the other plain text."""

    code = "PLAIN_TEXT"
    exit_code = 54


class CaMismatch(AccessError):
    """The other side's certificate is not of the CA that was joined, or does not name the host that was called."""

    code = "CA_MISMATCH"
    exit_code = 55


class JoinRefused(AccessError):
    """A join string is unknown, used, expired, or for something else."""

    code = "JOIN_REFUSED"
    exit_code = 56


class Overloaded(CallError):
    """Too much is asked for at a time; the caller can do without, or try later."""

    code = "OVERLOADED"


class Unreachable(FedevalError):
    """The coordinator does not answer at the address given."""

    code = "UNREACHABLE"
    exit_code = 2
    blame = Blame.CALLER


class Unavailable(Unreachable):
    """The coordinator answers but cannot serve now: it is starting, stopping, or waits for its journal. Repeat."""

    code = "UNAVAILABLE"


class TimedOut(FedevalError):
    """The time given on the command line ran out; the job goes on."""

    code = "TIMED_OUT"
    exit_code = 3
    blame = Blame.CALLER


# ---------------------------------------------------------------- this process cannot go on


class PortTaken(FedevalError):
    """The address to listen on is in use."""

    code = "PORT_TAKEN"
    exit_code = 40


class DirectoryLocked(FedevalError):
    """Another live process owns the data or spool directory."""

    code = "DIRECTORY_LOCKED"
    exit_code = 41


class JournalNewer(FedevalError):
    """The journal was written by a newer version of this program."""

    code = "JOURNAL_NEWER"
    exit_code = 42


class JournalCorrupt(FedevalError):
    """A row of the journal fails its checksum, or the file is not a journal."""

    code = "JOURNAL_CORRUPT"
    exit_code = 43


class JournalPaused(FedevalError):
    """The journal cannot be written at present; it is retried, and nothing is acknowledged meanwhile."""

    code = "JOURNAL_PAUSED"


class JournalFull(JournalPaused):
    """The journal cannot be written for want of space."""

    code = "JOURNAL_FULL"
    exit_code = 44


class JournalUnreachable(JournalPaused):
    """The database server that holds the journal does not answer, or not with what was asked."""

    code = "JOURNAL_UNREACHABLE"
    exit_code = 61


class JournalRefused(FedevalError):
    """The database server answers but lets this user not in, or not do what the journal needs."""

    code = "JOURNAL_REFUSED"
    exit_code = 62


class JournalExchanged(FedevalError):
    """The database holds another journal than it did: replaced under a running coordinator."""

    code = "JOURNAL_EXCHANGED"
    exit_code = 63


class DriverMissing(FedevalError):
    """The library that talks to the journal's database is not installed, or does not load."""

    code = "DRIVER_MISSING"
    exit_code = 60


class LeadershipLost(FedevalError):
    """Another coordinator leads now and has the journal: this one can decide nothing any more and must end."""

    code = "LEADERSHIP_LOST"
    exit_code = 64


class DirectoryUnusable(FedevalError):
    """A directory the process needs cannot be read or written."""

    code = "DIRECTORY_UNUSABLE"
    exit_code = 45


class IllegalTransition(FedevalError):
    """A state machine was asked for a step that its table lacks: a fault of this program, nobody else's."""

    code = "ILLEGAL_TRANSITION"
    exit_code = 70


class WorkerUnusable(FedevalError):
    """The agent's worker process cannot start on this node: the engine's libraries are missing or broken."""

    code = "WORKER_UNUSABLE"
    exit_code = 46
    blame = Blame.NODE


class ConfigError(FedevalError):
    """A command-line option or configuration value is wrong."""

    code = "CONFIG_INVALID"
    exit_code = 2
    blame = Blame.CALLER


#: Characters of a library's own error text that a message repeats.
MAX_REASON = 200


def reason(error: BaseException, named: str = "", instead: str = "") -> str:
    """Return a library's error as ``Type: text`` for use inside a message: one line, cut after ``MAX_REASON``.

    Where the text speaks of ``named``, such as a path that is ours alone, the result says ``instead``.
    """
    text = f"{error}".replace(named, instead) if named else f"{error}"
    text = " ".join(f"{type(error).__name__}: {text}".split())
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def by_code(code: str) -> type[FedevalError]:
    """Return the class whose ``code`` is ``code`` (``FedevalError`` itself for one that this version lacks)."""
    todo: list[type[FedevalError]] = [FedevalError]
    while todo:
        cls = todo.pop()
        if cls.code == code:
            return cls
        todo.extend(cls.__subclasses__())
    return FedevalError
