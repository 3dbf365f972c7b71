"""Whatever stands in `.env`, reading it gives settings or problems, never another exception."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bwd.core import settings_view
from bwd.core.dotenv import parse
from bwd.core.keys import KEYS, NCCL
from bwd.core.settings import diff, resolve
from bwd.errors import SettingsError

_NAMES = st.sampled_from([*KEYS, "MODEL_NAME", "NCCL_P2P_LEVEL", "NCCL_X", "VLLM_USE_V1", "VLLM_PORT", "X"])
_VALUES = st.one_of(
    st.text(max_size=30),
    st.sampled_from([key.example for key in KEYS.values()]),
    st.text("0123456789.,:-=% aekKmMsx[]{}'\"/~", max_size=20),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=6), st.dictionaries(_NAMES, _VALUES, max_size=3))
def test_any_file_and_any_shell(lines: list[tuple[str, str]], environ: dict[str, str]) -> None:
    text = "\n".join(f"{name}={value}" for name, value in lines)
    try:
        found = resolve(environ, parse(text.encode("utf-8", "surrogatepass")))
    except SettingsError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.problems
        assert "\n" not in str(refused)
        return
    assert {row.key for row in settings_view.rows(found)} >= set(KEYS) - {NCCL.name}
    assert diff(found, found).keys == ()


@pytest.mark.parametrize("name", list(KEYS))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=st.text(min_size=1, max_size=40).map(str.strip).filter(bool))
def test_any_value_of_each_key(name: str, value: str) -> None:
    blamed: set[str] = set()
    try:
        resolve({name: value, "API_KEY": "k"}, parse(b""))
    except SettingsError as error:
        blamed = {problem.key for problem in error.problems}
    assert blamed <= {name, "HOST"}
