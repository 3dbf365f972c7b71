"""Rows for a model that cannot be found, read or served. None of them is retried."""

# ruff: noqa: E501  (captured lines are kept long, as they were)

from __future__ import annotations

from bwd.core.events import Kind
from bwd.core.signature import ERROR, Action, Signature

_MEASURED = "captured: vLLM 0.32.0 on CPU, 2026-11-30"

MODEL: tuple[Signature, ...] = (
    Signature(
        id="DTYPE_QUANT",
        pattern=rf"{ERROR}torch\.(?P<dtype>\w+) is not supported for quantization method (?P<method>\S+?)\. Supported "
        r"dtypes: \[(?P<fits>[^\]]*)",
        means="{method} does not work with DTYPE={dtype}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="is not supported for quantization method",
        key="DTYPE",
        hint="one of these works: {fits}",
        fixture="ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: "
        "[torch.float16]",
        origin="vllm#1823; vLLM 0.32.0 config/vllm.py:910",
    ),
    Signature(
        id="QUANT_UNKNOWN",
        pattern=rf"{ERROR}Unknown quantization method: (?P<method>\S+?)\. Must be one of",
        means="vLLM has no quantization method {method}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Unknown quantization method",
        key="QUANTIZATION",
        hint="QUANTIZATION=auto takes the model's own; the name for AWQ is awq_marlin",
        fixture="  Value error, Unknown quantization method: awq_Marlin. Must be one of ['awq', 'fp8'].",
        origin="vLLM 0.32.0 config/model.py:1454",
    ),
    Signature(
        id="QUANT_MISMATCH",
        pattern=rf"{ERROR}Quantization method specified in the model config \((?P<has>\S+)\) does not match the "
        r"quantization method specified in the `quantization` argument \((?P<asked>\S+)\)",
        means="the model is quantized with {has}, not with {asked}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="does not match the quantization method",
        key="QUANTIZATION",
        hint="QUANTIZATION=auto would fit",
        fixture="  Value error, Quantization method specified in the model config (awq) does not match the quantization "
        "method specified in the `quantization` argument (fp8).",
        origin="vLLM 0.32.0 config/model.py:1444",
    ),
    Signature(
        id="QUANT_NOT_THERE",
        pattern=rf"{ERROR}Cannot find the config file for (?P<asked>\w+)",
        means="the model is not quantized with {asked}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Cannot find the config file for",
        key="QUANTIZATION",
        hint="QUANTIZATION=auto would fit",
        fixture="  Value error, Cannot find the config file for awq [type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]",
        origin=_MEASURED,
    ),
    Signature(
        id="MODEL_UNSUPPORTED",
        pattern=rf"{ERROR}Model architectures (?P<what>\[.*?\]|.+?) (?:are not supported for now|failed to be inspected)",
        means="this vLLM cannot serve the architecture {what}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Model architectures",
        key="MODEL",
        hint="choose another MODEL",
        fixture="ValueError: Model architectures ['LlavaFooForCausalLM'] are not supported for now. Supported "
        "architectures: dict_keys(['AquilaModel'])",
        origin="vLLM 0.32.0 model_executor/models/registry.py:1206",
    ),
    Signature(
        id="MODEL_CODE",
        pattern=rf"{ERROR}(?:The repository (?P<what>\S+) )?contains custom code which must be executed",
        means="the model brings code of its own, which is not run unasked",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="custom code which must be executed",
        key="EXTRA_VLLM_ARGS",
        hint="if you trust it: EXTRA_VLLM_ARGS=--trust-remote-code",
        fixture="ValueError: The repository acme/model contains custom code which must be executed to correctly load "
        "the model.",
        origin="transformers dynamic_module_utils",
    ),
    Signature(
        id="REASONING_TOKENS",
        pattern=rf"{ERROR}(?P<parser>\w+) reasoning parser could not locate think start/end tokens in the tokenizer",
        means="{parser} needs tokens for thinking that the model's tokenizer does not have",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="could not locate think start/end tokens",
        key="REASONING_PARSER",
        hint="REASONING_PARSER=none",
        fixture="RuntimeError: DeepSeekR1ReasoningParser reasoning parser could not locate think start/end tokens in the "
        "tokenizer!",
        origin="captured: vLLM 0.32.0 on 2x H200, 2026-11-30",
    ),
    Signature(
        id="MODEL_PATH",
        pattern=r"(?:\w+\.)*HFValidationError: (?P<why>.+)",
        means="there is no such folder, and it is no name of a repository either",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="HFValidationError",
        key="MODEL",
        hint="write a folder that exists, or owner/name",
        fixture="huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
        "'namespace/repo_name': '/nonexistent/model'. Use `repo_type` argument if needed.",
        origin=_MEASURED,
    ),
    Signature(
        id="WEIGHTS_NOT_HERE",
        pattern=r"(?:\w+\.)*LocalEntryNotFoundError: ",
        means="the model is not on this machine, and the engine does not download",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="LocalEntryNotFoundError",
        key="MODEL",
        hint="`bwd weights` gets it",
        fixture="huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for "
        "the specified revision on the local disk and outgoing traffic has been disabled.",
        origin="engine-on-cpu 5h2; vllm#23684",
    ),
    Signature(
        id="WEIGHTS_NONE",
        pattern=rf"{ERROR}Cannot find any model weights with `(?P<path>.+?)`",
        means="there are no weights in {path}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Cannot find any model weights",
        key="MODEL",
        hint="`bwd weights` gets them",
        fixture="(EngineCore pid=22073) ERROR 11-30 04:11:54 [core.py:1510] RuntimeError: Cannot find any model "
        "weights with `tiny`",
        origin=_MEASURED,
    ),
    Signature(
        id="WEIGHTS_BROKEN",
        pattern=r"(?:\w+\.)*SafetensorError: (?P<why>.+)",
        means="a file of the weights is broken or cut short: {why}",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="SafetensorError",
        key="MODEL",
        hint="`bwd weights` checks each file and gets it again",
        fixture="(EngineCore pid=23423) ERROR 11-30 04:12:41 [core.py:1510] safetensors._safetensors_rust.SafetensorError:"
        " Error while deserializing header: incomplete metadata, file not fully covered",
        origin=_MEASURED,
    ),
    Signature(
        id="HF_TOKEN_FORM",
        pattern=rf"{ERROR}Illegal header value b'Bearer ",
        means="HF_TOKEN is empty or holds a line break",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="Illegal header value",
        key="HF_TOKEN",
        hint="write it again, without quotes and blanks, or take the key out",
        fixture="httpx.LocalProtocolError: Illegal header value b'Bearer '",
        origin="measured with huggingface_hub 2.4.0; modelexpress#277",
    ),
    Signature(
        id="HF_REFUSED",
        pattern=r"(?:(?:\w+\.)*GatedRepoError: |(?:\w+\.)*\w+Error: 401 Client Error|Invalid credentials\b)",
        means="the hub refused the token, or the model wants an agreement first",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="GatedRepoError",
        also=("401 Client Error", "Invalid credentials"),
        key="HF_TOKEN",
        hint="check HF_TOKEN, and accept the terms on the model's page",
        fixture="huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1-0)",
        origin="huggingface_hub errors; podalize#8",
    ),
    Signature(
        id="HF_NOT_FOUND",
        pattern=r"(?:\w+\.)*(?:RepositoryNotFoundError|RevisionNotFoundError|EntryNotFoundError): ",
        means="the hub has no such model or revision, or it is private and HF_TOKEN does not open it",
        kind=Kind.CONFIG,
        action=Action.NOTICE,
        literal="NotFoundError",
        key="MODEL",
        hint="check MODEL, MODEL_REVISION and HF_TOKEN",
        fixture="huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-0)",
        origin="huggingface_hub errors; huggingface_hub PR#1202",
    ),
)
