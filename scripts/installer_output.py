"""What pip's and uv's output says: how far they are, and why they failed. Texts in, values out."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind`: hash, disk, network, missing or other; `detail`: the words that show it."""

    kind: str
    detail: str


_NETWORK = (
    "dns error",
    "failed to lookup",
    "name resolution",
    "connection refused",
    "connection reset",
    "network is unreachable",
    "connect error",
    "could not connect",
    "error sending request",
    "failed to establish",
    "newconnectionerror",
    "timed out",
    "certificate verify failed",
    "invalid peer certificate",
    "request failed after",
    "failed to fetch",
)
# In the order that decides: a file that does not match its hash is never blamed on the network, and pip
# reports a dead network as a package without versions, after it has warned of the connection.
_SIGNS = (
    ("hash", r"hash mismatch for `?([\w.+=-]+)|do not match the hashes[^\0]*?^\s+([\w.+-]+={2,3}[\w.+-]+)"),
    ("disk", r"(no space left on device|disk quota exceeded|os error 28|errno 28|errno 122)"),
    ("network", f"({'|'.join(_NETWORK)})"),
    ("missing", r"(?:there is no version of|no matching distribution found for|because)\s+`?([\w.+=-]+)"),
)


def classify(output: str) -> Failure:
    """The kind of an installer's failure, from its whole output."""
    for kind, pattern in _SIGNS:
        if match := re.search(pattern, output, re.MULTILINE | re.IGNORECASE):
            detail = next(group for group in match.groups() if group).strip()
            return Failure(kind, detail.replace("===", "=="))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match("error|cause", line, re.IGNORECASE)]
    return Failure("other", (errors or lines or ["no output"])[-1])


def progress(output: str, total: int) -> tuple[int, str]:
    """How many of `total` packages the output so far tells of, and what is being done.

    uv names only the larger downloads, so the small ones count as done once a large one is.
    """
    begun = re.findall(r"^\s*Downloading ([\w.-]+ \([^)]*\))", output, re.MULTILINE)
    ended = set(re.findall(r"^\s*Downloaded ([\w.-]+)", output, re.MULTILINE))
    if re.search(r"^(?:Prepared|Installed|Installing collected|Successfully)", output, re.MULTILINE):
        return total, "installing"
    if collected := len(re.findall(r"^(?:Collecting|Processing|Requirement already)", output, re.MULTILINE)):
        return min(collected, total), "collecting"
    going = [item for item in begun if item.split(" ", 1)[0] not in ended]
    if going:
        return total - len(going) if ended else 0, f"downloading {', '.join(going[:3])}"
    return (total, "unpacking") if begun else (0, "resolving")
