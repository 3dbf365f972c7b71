"""The settings: precedence and origins, every problem at once, aliases, secrets, changes, profiles."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from bwd.core import settings_view
from bwd.core.dotenv import DotEnv, parse
from bwd.core.keys import GROUPS, KEYS, NCCL, Key
from bwd.core.problem import Problem
from bwd.core.settings import Change, Origin, Secret, Settings, diff, profile_for, resolve
from bwd.core.settings_seed import ALIASES
from bwd.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]
KEY_ROWS = [key for key in KEYS.values() if key is not NCCL]


def of(text: str = "", environ: Mapping[str, str] | None = None, profile: str | None = None) -> Settings:
    """The settings for the text of a `.env`."""
    named = None if profile is None else parse(profile.encode(), "env/profiles/x.env")
    return resolve(environ or {}, parse(text.encode()), named)


def problems(
    text: str = "", environ: Mapping[str, str] | None = None, profile: str | None = None
) -> list[str]:
    """The problems for the text of a `.env`, a line each."""
    with pytest.raises(SettingsError) as caught:
        of(text, environ, profile)
    return [problem.line() for problem in caught.value.problems]


def warnings(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    return [warning.line() for warning in of(text, environ).warnings]


def assignment(key: Key) -> str:
    return key.example if key is NCCL else f"{key.name}='{key.example}'"


# ---- the list of keys


def test_nothing_set_gives_the_defaults_of_the_dataclass() -> None:
    given, plain = of(), Settings()
    for field in dataclasses.fields(Settings):
        if field.name not in ("origins", "warnings"):
            assert getattr(given, field.name) == getattr(plain, field.name), field.name
    assert {origin.source for origin in given.origins.values()} == {"default"}
    assert given.warnings == ()


def test_every_field_is_a_key_and_every_key_a_field() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)} - {"origins", "warnings"}
    assert fields == {key.field for key in KEYS.values()}


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_every_key_is_documented_and_its_example_is_valid(key: Key) -> None:
    assert key.name == next(name for name, known in KEYS.items() if known is key)
    assert key.doc.endswith(".")
    assert len(key.doc) > 20
    assert key.group in GROUPS
    assert key.reaches in ("argv", "env", "policy", "daemon", "weights", "build")
    assert key.change in ("none", "live", "restart")
    assert key.example
    text = assignment(key) + ("\nAPI_KEY=k" if key.name == "HOST" else "")
    assert of(text).origins[key.name] == Origin("file", ".env:1")


@pytest.mark.parametrize("key", KEY_ROWS, ids=[key.name for key in KEY_ROWS])
def test_every_default_parses_and_is_valid_when_written_out(key: Key) -> None:
    if key.default:
        assert key.parse(key.default) == getattr(Settings(), key.field)
        assert getattr(of(f"{key.name}={key.default}"), key.field) == getattr(Settings(), key.field)


@pytest.mark.parametrize("key", KEY_ROWS, ids=[key.name for key in KEY_ROWS])
def test_every_key_counts_in_the_process_environment(key: Key) -> None:
    environ = {key.name: key.example, "API_KEY": "k"}
    assert of("", environ).origins[key.name] == Origin("environment", "process environment")


def test_all_examples_together_are_valid() -> None:
    of("\n".join(assignment(key) for key in KEYS.values()))


# ---- precedence


def test_environment_over_file_over_profile_over_default() -> None:
    profile = "PORT=1001\nMAX_NUM_SEQS=1\nREPLICAS=3"
    settings = of("PORT=1002\nMAX_NUM_SEQS=2", {"PORT": "1003"}, profile)
    assert (settings.port, settings.max_num_seqs, settings.replicas) == (1003, 2, 3)
    assert settings.origins["PORT"] == Origin("environment", "process environment")
    assert settings.origins["MAX_NUM_SEQS"] == Origin("file", ".env:2")
    assert settings.origins["REPLICAS"] == Origin("profile", "env/profiles/x.env:3")
    assert settings.origins["HOST"] == Origin("default", "")


@pytest.mark.parametrize("empty", ["PORT=", "PORT= # later", "PORT=''", "PORT=' '"])
def test_an_empty_value_leaves_the_word_to_the_next(empty: str) -> None:
    assert of(empty, {"PORT": " "}, "PORT=1001").port == 1001
    assert of(empty).port == 8000


def test_an_explicit_auto_or_none_undoes_a_profile() -> None:
    settings = of(
        "MAX_NUM_SEQS=auto\nPYTORCH_ALLOC_CONF=none\nCPU_AFFINITY=none",
        profile="MAX_NUM_SEQS=4\nPYTORCH_ALLOC_CONF=expandable_segments:True\nCPU_AFFINITY=0-3",
    )
    assert (settings.max_num_seqs, settings.pytorch_alloc_conf, settings.cpu_affinity) == (None, "", "none")


def test_variables_of_the_shell_that_are_no_keys_do_not_count() -> None:
    environ = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_DEBUG": "nonsense",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_SUCH": "1",
        "MODEL_NAME": "x/y",
        "PATH": "/bin",
        "PORTT": "1",
    }
    settings = of("", environ)
    assert settings == of()
    assert settings.nccl == {}
    assert settings.extra_env == {}


def test_a_line_hidden_by_the_shell_is_told() -> None:
    assert warnings("MODEL=demo\nPORT=9000", {"PORT": "9001"}) == [
        ".env:2 PORT: has no effect: PORT is set in the process environment, which comes first. "
        "Unset PORT in the shell and start supervisord again"
    ]
    assert warnings("PORT=9000", {"PORT": "9000"}) == []


def test_a_hidden_secret_is_told_without_showing_either() -> None:
    told = warnings("API_KEY=file-secret", {"API_KEY": "shell-secret"})
    assert len(told) == 1
    assert "secret" not in told[0]


def test_a_bad_line_is_refused_even_where_the_shell_hides_it() -> None:
    assert problems("PORT=x", {"PORT": "9000"}) == [".env:1 PORT: 'x' is not a whole number. Use 1 to 65535"]


@pytest.mark.parametrize("name", ["HOST", "BUILD"])
def test_a_compilers_target_in_the_shell_is_no_setting(name: str) -> None:
    settings = of("", {name: "x86_64-conda-linux-gnu"})
    assert getattr(settings, name.lower()) == getattr(Settings(), name.lower())
    assert "a compiler's target" in settings.warnings[0].message


# ---- problems


def test_every_problem_is_told_at_once_in_the_order_of_the_lines() -> None:
    text = "MODEL=gpt2\nPORT 80\nPORTT=80\n\nPORT=0\nMAX_MODEL_LEN=lots\nEXTRA_VLLM_ARGS=--nope"
    assert problems(text, {"REPLICAS": "none"}) == [
        ".env:1 MODEL: 'gpt2' is not a model. "
        "Use a Hub repository ORG/NAME, a folder as /path or ./path, or demo",
        ".env:2:8: no = on this line. Write KEY=value, or # before a comment",
        ".env:3 PORTT: unknown key. Use PORT",
        ".env:5 PORT: 0 is out of range. Use 1 to 65535",
        ".env:6 MAX_MODEL_LEN: 'lots' is not a length in tokens. Use 32768, 32K (= 32768) or auto",
        ".env:7 EXTRA_VLLM_ARGS: vLLM 0.32.0 knows no flag --nope. Leave it out",
        "process environment REPLICAS: 'none' is not a whole number. Use 1 to 64",
    ]


def test_problems_of_a_profile_are_told_under_its_name() -> None:
    assert problems("", None, "PORTT=1\nA B") == [
        "env/profiles/x.env:1 PORTT: unknown key. Use PORT",
        "env/profiles/x.env:2:4: no = on this line. Write KEY=value, or # before a comment",
    ]


def test_a_file_that_was_never_a_dotenv_does_not_flood() -> None:
    told = problems("\n".join("word" for _ in range(900)))
    assert len(told) == 51
    assert told[-1] == "and 850 more problems"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PORTT", "use PORT"),
        ("port", "use PORT"),
        ("MAX_MODEL_LENGHT", "use MAX_MODEL_LEN"),
        ("TENSOR_PARALEL_SIZE", "use TENSOR_PARALLEL_SIZE"),
        ("MODELNAME", "use MODEL"),
        ("HF-TOKEN", ""),
        ("ENFORCE_EAGER", "write EXTRA_VLLM_ARGS=--enforce-eager"),
        ("TRUST_REMOTE_CODE", "write EXTRA_VLLM_ARGS=--trust-remote-code"),
        ("BLOCK_SIZE", "write EXTRA_VLLM_ARGS=--block-size=..."),
        ("SHUTDOWN_TIMEOUT", "use DRAIN_SECONDS"),
        ("VLLM_LOGING_LEVEL", "use VLLM_LOGGING_LEVEL"),
        ("VLLM_QQQQQQ", "remove the line"),
        ("BWD_STATE_DIR", "export it in the shell instead"),
        (
            "OMP_NUM_THREADS",
            "for a variable of the engine write EXTRA_ENV=OMP_NUM_THREADS=..., else remove the line",
        ),
    ],
)
def test_an_unknown_key_names_what_was_meant(name: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        of(f"{name}=1")
    (problem,) = caught.value.problems
    if hint:
        assert (problem.key, problem.where, problem.hint) == (name, ".env:1", hint)


def test_the_error_as_text_is_one_line() -> None:
    with pytest.raises(SettingsError) as caught:
        of("PORT=x\nHOST=http://x")
    assert "\n" not in str(caught.value)


# ---- rules between keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost", "[::]"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    assert "set API_KEY, or HOST=127.0.0.1" in problems(f"MODEL=demo\nHOST={host}")[0].lower().replace(
        "api_key", "API_KEY"
    ).replace("host=", "HOST=")
    assert of(f"HOST={host}\nAPI_KEY=k").host == host.strip("[]")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "[::1]"])
def test_this_machine_itself_needs_none(host: str) -> None:
    assert of(f"HOST={host}").host == host.strip("[]")


def test_a_refused_key_is_not_also_a_missing_one() -> None:
    assert problems("HOST=0.0.0.0\nAPI_KEY='a b'") == [
        ".env:2 API_KEY: the key has a space or a character outside ASCII in it. Paste it again"
    ]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("P2P=on\nNCCL_P2P_DISABLE=1", "P2P"),
        ("P2P=off\nNCCL_P2P_DISABLE=0", "P2P"),
        ("NVLINK_MULTICAST=off\nNCCL_NVLS_ENABLE=1", "NVLINK_MULTICAST"),
        ("CPU_AFFINITY=0-3\nEXTRA_VLLM_ARGS=--numa-bind", "CPU_AFFINITY"),
        ("CPU_AFFINITY=0-3\nEXTRA_ENV=VLLM_CPU_OMP_THREADS_BIND=0-3", "CPU_AFFINITY"),
        ("HF_TOKEN=abcdefghijklmnop", "HF_TOKEN"),
        ("EXTRA_ENV=VLLM_LOG_STATS_INTERVAL=5\nVLLM_LOG_STATS_INTERVAL=6", "VLLM_LOG_STATS_INTERVAL"),
    ],
)
def test_what_excludes_each_other_is_refused(text: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        of(text)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert caught.value.problems[0].where.startswith(".env:")
    assert caught.value.problems[0].hint


@pytest.mark.parametrize(
    "text",
    [
        "P2P=on\nNCCL_P2P_DISABLE=0",
        "P2P=auto\nNCCL_P2P_DISABLE=1",
        "NVLINK_MULTICAST=off\nNCCL_NVLS_ENABLE=0",
        "CPU_AFFINITY=none\nEXTRA_VLLM_ARGS=--numa-bind",
        "HF_ENDPOINT=https://mirror.example\nHF_TOKEN=abcdefghijklmnop",
    ],
)
def test_what_goes_together_is_taken(text: str) -> None:
    of(text)


# ---- a .env from elsewhere

SEED = """\
MODEL_NAME=casperhansen/deepseek-r1-distill-qwen-32b-awq
HUGGING_FACE_HUB_TOKEN=hf_abcdefghijklmnopqrst
TENSOR_PARALLEL_SIZE=2
GPU_MEMORY_UTILIZATION=0.90
MAX_MODEL_LEN=32768
CPU_AFFINITY=1-5,25-29
NCCL_P2P_LEVEL=PCI
NCCL_DMABUF_ENABLE=1
NCCL_IGNORE_CPU_AFFINITY=1
VLLM_USE_V1=0
VLLM_GPU_ARCH=12.0
VLLM_ATTENTION_BACKEND=FLASHINFER
PYTORCH_ALLOC_CONF=expandable_segments:True
"""


def test_the_seeds_own_file_starts_with_one_warning_a_line_that_upstream_ignores() -> None:
    settings = of(SEED)
    assert settings.model == "casperhansen/deepseek-r1-distill-qwen-32b-awq"
    assert settings.hf_token == Secret("hf_abcdefghijklmnopqrst")
    assert settings.tensor_parallel_size == 2
    assert settings.gpu_memory_utilization == 0.9
    assert settings.max_model_len == 32768
    assert settings.cpu_affinity == "1-5,25-29"
    assert settings.attention_backend == "FLASHINFER"
    assert settings.pytorch_alloc_conf == "expandable_segments:True"
    assert settings.nccl == {"NCCL_DMABUF_ENABLE": "1"}
    assert settings.extra_env == {}
    told = {warning.key: warning.message for warning in settings.warnings}
    assert len(told) == len(settings.warnings)
    assert set(told) == {
        "MODEL_NAME",
        "HUGGING_FACE_HUB_TOKEN",
        "NCCL_P2P_LEVEL",
        "NCCL_DMABUF_ENABLE",
        "NCCL_IGNORE_CPU_AFFINITY",
        "VLLM_USE_V1",
        "VLLM_GPU_ARCH",
        "VLLM_ATTENTION_BACKEND",
    }
    assert "LOC, NVL, PIX, PXB, PHB and SYS" in told["NCCL_P2P_LEVEL"]


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_an_alias_is_taken_with_a_warning(alias: str, key: str) -> None:
    settings = of(f"{alias}={KEYS[key].example}" + ("\nAPI_KEY=k" if key == "HOST" else ""))
    assert settings.origins[key] == Origin("file", ".env:1")
    assert settings.warnings[0].line() == f".env:1 {alias}: read as {key}. Rename it to {key}"


def test_the_key_itself_wins_over_its_alias_in_either_order() -> None:
    for text in ("MODEL_NAME=a/b\nMODEL=c/d", "MODEL=c/d\nMODEL_NAME=a/b"):
        settings = of(text)
        assert settings.model == "c/d"
        assert "left out: MODEL is set too" in settings.warnings[0].message


def test_an_alias_of_the_file_wins_over_the_profile() -> None:
    assert of("MODEL_NAME=a/b", profile="MODEL=c/d").model == "a/b"


def test_a_line_of_a_variable_that_the_engine_reads_joins_extra_env() -> None:
    settings = of("VLLM_LOG_STATS_INTERVAL=5\nEXTRA_ENV=OMP_PROC_BIND=false")
    assert settings.extra_env == {"OMP_PROC_BIND": "false", "VLLM_LOG_STATS_INTERVAL": "5"}
    assert settings.origins["VLLM_LOG_STATS_INTERVAL"] == Origin("file", ".env:1")


@pytest.mark.parametrize(
    "line",
    ["VLLM_PORT=8000", "HF_HUB_OFFLINE=1", "HF_HUB_ENABLE_HF_TRANSFER=1", "NVIDIA_VISIBLE_DEVICES=all"],
)
def test_a_line_without_effect_is_left_out_with_the_reason(line: str) -> None:
    settings = of(line)
    assert settings.extra_env == {}
    assert [warning.message.startswith("left out: ") for warning in settings.warnings] == [True]


def test_the_cards_can_be_chosen_on_a_line_of_its_own() -> None:
    settings = of("CUDA_VISIBLE_DEVICES=1")
    assert settings.extra_env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert settings.origins["EXTRA_ENV"] == Origin("file", ".env:1")
    assert settings.warnings == ()


# ---- secrets

HIDDEN = ("hf_abcdefghijSECRET", "sk-SECRET", "aws-SECRET")


def test_secrets_appear_nowhere() -> None:
    settings = of(f"HF_TOKEN={HIDDEN[0]}\nAPI_KEY={HIDDEN[1]}\nEXTRA_ENV=S3_SECRET_ACCESS_KEY={HIDDEN[2]}")
    seen = repr((settings.hf_token, settings.api_key, settings.origins, settings.warnings))
    seen += f"{settings.hf_token} {settings.api_key:>40} {settings.hf_token!r}"
    seen += json.dumps([dataclasses.asdict(row) for row in settings_view.rows(settings)])
    assert "SECRET" not in seen.replace("S3_SECRET_ACCESS_KEY", "")
    assert settings_view.secret_texts(settings) == HIDDEN


def test_a_secret_is_compared_and_never_pickled() -> None:
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1
    assert copy.deepcopy(Secret("a")) == Secret("a")
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret("a"))


@pytest.mark.parametrize("key", ["HF_TOKEN", "API_KEY"])
@pytest.mark.parametrize("bad", ["SECRET word", "\u00e9SECRET", "'SECRET'x", 'SECRET"'])
def test_a_refused_secret_is_not_shown(key: str, bad: str) -> None:
    with pytest.raises(SettingsError) as caught:
        of("", {key: bad})
    assert "SECRET" not in str(caught.value)


def test_a_secret_among_the_flags_is_not_shown() -> None:
    assert "SECRET" not in problems("EXTRA_VLLM_ARGS=--api-key SECRET --hf-token=SECRET")[0]
    assert "SECRET" not in problems("EXTRA_ENV='HF_TOKEN=hf_SECRET'")[0]
    assert "SECRET" not in problems("EXTRA_ENV='A=1 my SECRET'")[0]


def test_a_password_in_an_address_is_hidden() -> None:
    assert settings_view.hide("HTTPS_PROXY", "http://me:pw@proxy:1/") == "http://***@proxy:1/"
    assert settings_view.hide("MY_API_KEY", "x") == "***"
    assert settings_view.hide("VLLM_KV_CACHE_LAYOUT", "NHD") == "NHD"


def test_every_row_reads_as_it_could_stand_in_the_file() -> None:
    text = "\n".join(assignment(key) for key in KEYS.values())
    shown = {row.key: row.value for row in settings_view.rows(of(text))}
    assert shown["EXTRA_VLLM_ARGS"] == KEYS["EXTRA_VLLM_ARGS"].example
    assert shown["EXTRA_ENV"] == KEYS["EXTRA_ENV"].example
    assert shown["NCCL_DEBUG"] == "INFO"
    assert shown["API_KEY"] == "***"
    again = "\n".join(f"{key}='{value}'" for key, value in shown.items() if value not in ("***", ""))
    assert (
        diff(of(text), of(again + "\nAPI_KEY=sk-3f9a0c2b7d\nHF_TOKEN=" + KEYS["HF_TOKEN"].example)).keys == ()
    )


# ---- changes


@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_a_changed_key_is_classified_as_documented(key: Key) -> None:
    other = {
        "ENGINE": "cpu", "BUILD": "wheel", "BUILD_SOURCE": "git", "PORT": "9000", "P2P": "off",
        "REPLICAS": "2", "DRAIN_SECONDS": "31", "HOLD_SECONDS": "11", "CANARY_SECONDS": "31",
    }  # fmt: skip
    text = f"{key.name}={other[key.name]}" if key.name in other else assignment(key)
    before, after = of("API_KEY=k"), of(f"API_KEY=k\n{text}")
    assert diff(before, after) == Change(key.change, (key.name,))
    assert diff(after, before) == Change(key.change, (key.name,))


def test_comments_order_and_origin_are_no_change() -> None:
    before = of("PORT=9000\nMODEL=demo")
    assert diff(before, of("# new\nMODEL = 'demo'  # same\n\nPORT=9000", {"PORT": "9000"})) == Change(
        "none", ()
    )


def test_the_strongest_change_counts() -> None:
    assert diff(of(), of("PORT=9000\nMAX_NUM_SEQS=8")) == Change("restart", ("PORT", "MAX_NUM_SEQS"))


# ---- profiles


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        ([], "cpu"),
        (["NVIDIA GeForce RTX 5090"], "rtx5090x1"),
        (["NVIDIA GeForce RTX 5090"] * 2, "rtx5090x2"),
        (["NVIDIA GeForce RTX 5090"] * 3, "none"),
        (["NVIDIA GeForce RTX 5090 D"] * 2, "none"),
        (["NVIDIA GeForce RTX 5090 Laptop GPU"], "none"),
        (["NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090"], "none"),
        (["NVIDIA GeForce RTX 4090"], "none"),
        (["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"] * 2, "rtxpro6000x2"),
        (["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"] * 2, "rtxpro6000x2"),
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"], "none"),
        (["NVIDIA H200"] * 2, "h200x2"),
        (["NVIDIA H200 NVL"] * 2, "h200x2"),
        (["NVIDIA H200"] * 8, "none"),
        (["NVIDIA B200"] * 2, "none"),
    ],
)
def test_the_profile_of_a_machine(names: list[str], profile: str) -> None:
    assert profile_for(names) == profile
    assert profile == "none" or (ROOT / "env" / "profiles" / f"{profile}.env").is_file()


PROFILES = sorted((ROOT / "env" / "profiles").glob("*.env"))


def test_the_profiles_are_there() -> None:
    assert [path.stem for path in PROFILES] == [
        "cpu",
        "h200x2",
        "rtx5090x1",
        "rtx5090x2",
        "rtxpro6000x2",
        "seed",
    ]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: str(path.stem))
def test_a_profile_is_valid_without_a_warning_and_has_no_address_or_secret(path: Path) -> None:
    found = parse(path.read_bytes(), f"env/profiles/{path.name}")
    settings = resolve({}, DotEnv(".env"), found)
    assert settings.warnings == ()
    assert not {"HOST", "PORT", "API_KEY", "HF_TOKEN", "PROFILE"} & {entry.key for entry in found.entries}


def test_the_seed_profile_is_the_seeds_launch() -> None:
    found = parse((ROOT / "env" / "profiles" / "seed.env").read_bytes())
    settings = resolve({}, DotEnv(".env"), found)
    assert settings.extra_vllm_args == ("--enforce-eager", "--disable-custom-all-reduce")
    assert (settings.tensor_parallel_size, settings.max_model_len) == (2, 32768)
    assert settings.pytorch_alloc_conf == "expandable_segments:True"


# ---- what is generated from the list


def test_the_example_file_is_valid_as_it_stands_and_sets_nothing() -> None:
    found = parse((ROOT / "env" / ".env.example").read_bytes())
    assert found == DotEnv(".env")


def test_the_example_file_is_valid_with_every_key_taken_into_use() -> None:
    text = (ROOT / "env" / ".env.example").read_text("utf-8")
    used = re.sub(r"^#(?=[A-Z0-9_]+=)", "", text, flags=re.MULTILINE)
    settings = of(used)
    assert {name for name, origin in settings.origins.items() if origin.source == "file"} >= set(KEYS)


def test_what_documents_the_settings_is_in_step_with_them() -> None:
    import env_example

    assert env_example.main(["--check"]) == 0, "run scripts/env_example.py"


def test_a_problem_is_one_line() -> None:
    assert Problem("PORT", ".env:12", "'x' is not a port", "use 1 to 65535").line() == (
        ".env:12 PORT: 'x' is not a port. Use 1 to 65535"
    )
