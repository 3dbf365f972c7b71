"""Takes secrets out of text that is about to be written down or shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

# Hub tokens by their form (hf_ and 34 letters; older ones are longer or shorter), bearer headers, and
# what vLLM prints of its own arguments (vllm#53625): 'hf_token': '...', 'api_key': ['...']
_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{8,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/=-]{4,}"
    r"|(?<='api_key': \[)[^\]]+(?=\])"
    r"|(?<='hf_token': ')[^']+(?=')"
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with these secrets, and whatever has the form of one, replaced by `***`. A secret shorter
    than four characters is left: it would take ordinary words with it."""
    for secret in secrets:
        if len(secret) >= 4 and secret in text:
            text = text.replace(secret, HIDDEN)
    return _FORMS.sub(HIDDEN, text)
