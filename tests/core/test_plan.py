"""The launch plan: classes, ladder, devices, and what is handed to the engine."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bwd.core.engine_choice import choose
from bwd.core.host import GIB, GpuProcess, HostFacts, LostGpu
from bwd.core.keys import KEYS
from bwd.core.lifecycle import Policy
from bwd.core.plan import P2pVerdict, ladder, make_plan
from bwd.core.plan_text import render
from bwd.core.plan_values import from_dict
from bwd.errors import PlanError
from tests.core.plan_support import (
    WHERE,
    card,
    demo,
    env,
    flag,
    machine,
    no_gpu,
    origin,
    plan,
    r1,
    refused,
)

FUSED_OFF = '{"pass_config":{"fuse_allreduce_rms":false}}'


def passed(host: HostFacts) -> P2pVerdict:
    return P2pVerdict(True, host.boot_key, "4 steps in 61 s")


def pro6000(index: int, **changes: object) -> object:
    made = card(
        index,
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        memory_total=95 * GIB,
        memory_free=94 * GIB,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def pros(**changes: object) -> HostFacts:
    host = machine(pro6000(0), pro6000(1), p2p={(0, 1): "OK"})  # type: ignore[arg-type]
    return dataclasses.replace(host, **changes)  # type: ignore[arg-type]


def h200s(**changes: object) -> HostFacts:
    cards = [
        card(
            i,
            name="NVIDIA H200",
            memory_total=139 * GIB,
            memory_free=139 * GIB,
            capability=(9, 0),
            memory_bandwidth=4_814_304_000_000,
            pci_path=(),
        )
        for i in range(2)
    ]
    host = machine(*cards, p2p={(0, 1): "OK"}, nvlink=True)
    return dataclasses.replace(host, **changes)  # type: ignore[arg-type]


class TestClassA:
    def test_two_stock_geforce_cards_have_no_p2p(self) -> None:
        made = plan()
        assert made.gpu_class == "A"
        assert made.env["NCCL_P2P_DISABLE"] == "1"
        assert flag(made, "--disable-custom-all-reduce") == ""
        assert made.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert "NCCL_P2P_LEVEL" not in made.env

    def test_p2p_that_the_driver_only_claims_does_not_count(self) -> None:
        host = machine(card(0), card(1), p2p={(0, 1): "OK"})
        made = plan(host=host)
        assert made.gpu_class == "A"
        assert any("bwd doctor p2p" in warning for warning in made.warnings)

    def test_a_failed_test_is_a_veto(self) -> None:
        host = pros()
        veto = P2pVerdict(False, host.boot_key, "writes land elsewhere")
        made = plan(host=host, p2p_verdict=veto)
        assert made.gpu_class == "A"
        text = refused("P2P=on\n", host, p2p_verdict=veto)
        assert text == ".env:1 P2P: the P2P test failed here: writes land elsewhere. P2P=auto or P2P=off"

    def test_nccl_p2p_disable_takes_the_custom_all_reduce_with_it(self) -> None:
        host = pros()
        made = plan("NCCL_P2P_DISABLE=1\n", host, p2p_verdict=passed(host))
        assert made.gpu_class == "A"
        assert flag(made, "--disable-custom-all-reduce") == ""

    def test_neither_half_of_the_pair_can_be_undone(self) -> None:
        made = plan("NCCL_P2P_DISABLE=0\n")
        assert made.env["NCCL_P2P_DISABLE"] == "1"
        assert any(warning.startswith(".env:1 NCCL_P2P_DISABLE=0 has no effect") for warning in made.warnings)
        assert "Leave --no-disable-custom-all-reduce out" in refused(
            "EXTRA_VLLM_ARGS=--no-disable-custom-all-reduce\n"
        )

    def test_the_owner_is_told_that_replicas_serve_many_streams_better(self) -> None:
        assert any("REPLICAS=2 with TENSOR_PARALLEL_SIZE=1" in w for w in plan().warnings)


class TestClassB:
    def test_pcie_p2p_counts_once_it_passed_the_test_on_this_machine(self) -> None:
        host = pros()
        made = plan(host=host, p2p_verdict=passed(host))
        assert made.gpu_class == "B"
        assert "NCCL_P2P_DISABLE" not in made.env
        assert flag(made, "--disable-custom-all-reduce") is None
        assert made.env["VLLM_SKIP_P2P_CHECK"] == "0"
        assert "PYTORCH_ALLOC_CONF" not in made.env

    def test_a_verdict_of_another_driver_or_kernel_counts_as_none(self) -> None:
        verdict = passed(pros())
        assert plan(host=pros(kernel="7.0.1"), p2p_verdict=verdict).gpu_class == "A"
        assert plan(host=pros(driver_text="590.44"), p2p_verdict=verdict).gpu_class == "A"

    def test_on_is_taken_with_a_warning_where_the_driver_agrees(self) -> None:
        made = plan("P2P=on\n", pros())
        assert made.gpu_class == "B"
        assert any("without a passed" in warning for warning in made.warnings)

    def test_on_cannot_force_what_the_driver_refuses(self) -> None:
        assert refused("P2P=on\n") == ".env:1 P2P: the driver says CNS between the cards: no P2P. P2P=auto"

    def test_the_answers_that_vllm_stores_are_deleted(self) -> None:
        host = pros()
        made = plan(host=host, p2p_verdict=passed(host))
        assert made.stale_files == (
            "/state/cache/vllm/gpu_p2p_access_cache_for_*.json",
            "/state/run/????????-????-????-????-????????????",
        )

    def test_the_sockets_that_vllm_leaves_behind_are_deleted_but_in_a_folder_of_ones_own(self) -> None:
        made = plan()
        assert made.env["VLLM_RPC_BASE_PATH"] == "/state/run"
        assert "/state/run/????????-????-????-????-????????????" in made.stale_files
        own = plan("EXTRA_ENV=VLLM_RPC_BASE_PATH=/mine\n")
        assert own.env["VLLM_RPC_BASE_PATH"] == "/mine"
        assert not [pattern for pattern in own.stale_files if "????" in pattern]

    # bwd's own socket fits into both, a slash and 36 letters more do not: bytes count
    @pytest.mark.parametrize("folder", ["/s" * 36, "/" + "ü" * 36])
    def test_a_run_folder_too_deep_for_vllms_names_leaves_them_where_vllm_puts_them(
        self, folder: str
    ) -> None:
        where = dataclasses.replace(WHERE, uds=f"{folder}/engine.sock")
        made = make_plan(env(""), machine(card(0), card(1)), r1(), where)
        assert "VLLM_RPC_BASE_PATH" not in made.env
        assert not [pattern for pattern in made.stale_files if "????" in pattern]

    def test_nccl_gets_the_level_that_its_default_stops_short_of(self) -> None:
        intel = pros(cpu_model="Intel(R) Xeon(R) w9-3495X")
        assert plan(host=intel, p2p_verdict=passed(intel)).env["NCCL_P2P_LEVEL"] == "PHB"
        amd = pros()
        assert "NCCL_P2P_LEVEL" not in plan(host=amd, p2p_verdict=passed(amd)).env
        sockets = machine(
            pro6000(0, numa_node=0),  # type: ignore[arg-type]
            pro6000(1, numa_node=1),  # type: ignore[arg-type]
            cpu_model="Intel(R) Xeon(R)",
            p2p={(0, 1): "OK"},
        )
        assert plan(host=sockets, p2p_verdict=passed(sockets)).env["NCCL_P2P_LEVEL"] == "SYS"

    def test_expandable_segments_would_crash_it(self) -> None:
        host = pros()
        text = refused(
            "MODEL=demo\nPYTORCH_ALLOC_CONF=expandable_segments:True\n", host, p2p_verdict=passed(host)
        )
        assert text.startswith(".env:2 PYTORCH_ALLOC_CONF: expandable_segments with the custom all-reduce")
        for cure in (
            "P2P=off",
            "EXTRA_VLLM_ARGS=--disable-custom-all-reduce",
            "EXTRA_VLLM_ARGS=--enforce-eager",
            "TENSOR_PARALLEL_SIZE=1",
        ):
            cured = f"PYTORCH_ALLOC_CONF=expandable_segments:True\n{cure}\n"
            assert refused(cured, host, p2p_verdict=passed(host)) == ""


class TestClassC:
    def test_nvlink_needs_no_test(self) -> None:
        made = plan(host=h200s())
        assert made.gpu_class == "C"
        assert not {"NCCL_P2P_DISABLE", "PYTORCH_ALLOC_CONF", "VLLM_ALLREDUCE_USE_SYMM_MEM"} & set(made.env)
        assert flag(made, "--disable-custom-all-reduce") is None

    def test_a_failed_test_is_a_veto_there_too(self) -> None:
        host = h200s()
        assert plan(host=host, p2p_verdict=P2pVerdict(False, host.boot_key, "hang")).gpu_class == "A"


class TestMulticast:
    @pytest.mark.parametrize(
        ("text", "changes"),
        [
            ("", {"environ_multicast_off": True}),
            ("NVLINK_MULTICAST=off\n", {}),
            ("NCCL_NVLS_ENABLE=0\n", {}),
        ],
    )
    def test_off_reaches_all_four_who_would_use_it(self, text: str, changes: dict[str, object]) -> None:
        made = plan(text, h200s(**changes))
        assert made.env["NCCL_NVLS_ENABLE"] == "0"
        assert made.env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert made.env["NVSHMEM_DISABLE_NVLS"] == "1"
        assert flag(made, "--compilation-config") == FUSED_OFF
        assert made.env["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
        assert made.env["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"

    def test_it_holds_for_one_card_and_for_replicas_as_well(self) -> None:
        for text in ("TENSOR_PARALLEL_SIZE=1\n", "REPLICAS=2\n"):
            made = plan(text, h200s(environ_multicast_off=True))
            assert flag(made, "--compilation-config") == FUSED_OFF

    @pytest.mark.parametrize(
        "words",
        [
            "-cc.mode=3",
            "--compilation-config.mode=3",
            "-cc.mode 3",
            """--seed 1 '--compilation-config={"mode":3}'""",
            """-cc '{"mode":3}'""",
        ],
    )
    def test_a_compilation_config_of_the_user_is_merged_with_it(self, words: str) -> None:
        made = plan(f"EXTRA_VLLM_ARGS={words}\n", h200s(environ_multicast_off=True))
        merged = flag(made, "--compilation-config")
        assert merged is not None
        assert json.loads(merged) == {"mode": 3, "pass_config": {"fuse_allreduce_rms": False}}
        assert not [word for word in made.argv if word.startswith("-cc")]

    def test_it_cannot_be_turned_on_past_the_setting(self) -> None:
        host = h200s(environ_multicast_off=True)
        extra = "EXTRA_VLLM_ARGS=-cc.pass_config.fuse_allreduce_rms=true\n"
        assert "uses NVLink multicast, which is off here" in refused(extra, host)
        assert "turns NVLink multicast on" in refused("EXTRA_ENV=NVSHMEM_DISABLE_NVLS=0\n", host)
        assert ".env:1 NCCL_NVLS_ENABLE: NVLink multicast is off here" in refused(
            "NCCL_NVLS_ENABLE=1\n", host
        )

    def test_without_a_reason_it_stays_as_upstream_has_it(self) -> None:
        assert flag(plan(host=h200s()), "--compilation-config") is None


class TestLadder:
    def test_each_step_keeps_the_ones_before(self) -> None:
        host = h200s()
        first = plan(host=host, rung=1)
        assert first.env["NCCL_P2P_DISABLE"] == "1"
        assert flag(first, "--attention-backend") == "FLASHINFER"
        second = plan(host=host, rung=2)
        assert second.env["NCCL_P2P_DISABLE"] == "1"
        assert flag(second, "--attention-backend") == "TRITON_ATTN"
        assert flag(second, "--enforce-eager") is None
        third = plan(host=host, rung=3)
        assert flag(third, "--enforce-eager") == ""
        assert origin(third, "--enforce-eager") == "ladder"
        assert len({p.digest for p in (plan(host=host), first, second, third)}) == 4

    def test_only_steps_that_change_something_are_offered(self) -> None:
        assert [rung.number for rung in ladder(plan(host=h200s()))] == [1, 2, 3]
        assert [rung.number for rung in ladder(plan())] == [2, 3]
        assert [rung.number for rung in ladder(plan(rung=2))] == [3]
        assert ladder(plan(rung=3)) == ()
        eager = plan("EXTRA_VLLM_ARGS=--enforce-eager\n")
        assert [rung.number for rung in ladder(eager)] == [2]
        assert ladder(make_plan(env(), no_gpu(), demo(), WHERE)) == ()

    def test_a_user_of_triton_attention_falls_back_to_flashinfer(self) -> None:
        assert flag(plan("ATTENTION_BACKEND=TRITON_ATTN\n", rung=2), "--attention-backend") == "FLASHINFER"

    def test_what_worked_here_before_is_where_a_start_begins(self) -> None:
        host = h200s()
        made = plan(host=host, remembered={host.key: 1})
        assert (made.rung, made.gpu_class) == (1, "A")
        assert any("what worked with this driver" in warning for warning in made.warnings)
        assert plan(host=h200s(driver_text="590.1"), remembered={host.key: 1}).rung == 0

    def test_p2p_on_asks_for_another_try(self) -> None:
        host = h200s()
        assert plan("P2P=on\n", host, remembered={host.key: 1}).rung == 0
        assert plan("P2P=on\n", host, rung=1, remembered={host.key: 1}).rung == 1

    def test_expandable_segments_returns_with_p2p_off(self) -> None:
        host = h200s()
        text = "PYTORCH_ALLOC_CONF=expandable_segments:True\n"
        assert refused(text, host) != ""
        assert refused(text, host, rung=1) == ""


class TestCards:
    def test_a_large_model_takes_both_cards_and_a_small_one_does_not(self) -> None:
        assert plan().tensor_parallel_size == 2
        assert plan(model=demo()).tensor_parallel_size == 1

    def test_before_the_model_is_there_all_cards_are_planned(self) -> None:
        made = make_plan(env(), machine(card(0), card(1)), None, WHERE)
        assert made.tensor_parallel_size == 2
        assert any("not here yet" in warning for warning in made.warnings)

    def test_three_cards_give_two_ranks(self) -> None:
        made = plan(host=machine(card(0), card(1), card(2)))
        assert made.tensor_parallel_size == 2
        assert made.env["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert any("GPU 2 stays idle" in warning for warning in made.warnings)

    def test_unlike_cards_are_not_mixed_by_themselves(self) -> None:
        other = card(0, name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory_total=24 * GIB)
        made = plan(host=machine(other, card(1), card(2)))
        assert made.gpus == (1, 2)
        assert any("unlike cards" in warning for warning in made.warnings)
        whole = plan("TENSOR_PARALLEL_SIZE=2\n", machine(other, card(1)))
        assert whole.gpus == (0, 1)
        assert any("pace and with the memory of the least" in warning for warning in whole.warnings)

    def test_replicas_take_a_card_each(self) -> None:
        made = plan("REPLICAS=2\n")
        assert (made.tensor_parallel_size, made.replicas, made.gpu_class) == (1, 2, "none")
        assert flag(made, "--data-parallel-size") == "2"
        assert made.gpus == (0, 1)
        assert "NCCL_P2P_DISABLE" not in made.env

    def test_too_few_cards_name_a_value_that_works(self) -> None:
        assert refused("TENSOR_PARALLEL_SIZE=4\n") == (
            ".env:1 TENSOR_PARALLEL_SIZE: 4 needs 4 GPUs, 2 GPUs here. TENSOR_PARALLEL_SIZE=2"
        )
        assert refused("TENSOR_PARALLEL_SIZE=2\nREPLICAS=2\n") == (
            ".env:2 REPLICAS: 2 replicas of 2 need 4 GPUs, 2 GPUs here. REPLICAS=1"
        )

    def test_a_card_off_the_bus_is_named_and_kept_out(self) -> None:
        host = machine(card(0), lost=(LostGpu("0000:41:00.0", "it has fallen off the bus: reboot"),))
        made = plan(host=host)
        assert made.env["CUDA_VISIBLE_DEVICES"] == "0"
        assert made.warnings[0] == "the GPU at 0000:41:00.0 is not usable: it has fallen off the bus: reboot"
        assert "1 GPU here (1 more not usable)" in refused("TENSOR_PARALLEL_SIZE=2\n", host)

    def test_mig_is_refused_with_the_command_that_ends_it(self) -> None:
        text = refused(host=machine(card(0, mig=True), card(1)))
        assert text == (
            "GPU 0: is in MIG mode; bwd serves whole cards. `nvidia-smi -i 0 -mig 0`, "
            "or CUDA_VISIBLE_DEVICES=1"
        )

    def test_old_cards_and_drivers(self) -> None:
        old = machine(card(0, name="NVIDIA GeForce GTX 1080", capability=(6, 1)))
        assert choose("auto", old).engine == "cpu"
        assert "6.1" in refused("ENGINE=cuda\n", old)
        driver = machine(card(0), driver=(570, 1), driver_text="570.1")
        assert choose("auto", driver).engine == "cpu"
        assert "Install driver R580, or ENGINE=cpu" in refused("ENGINE=cuda\n", driver)
        own = f"ENGINE=cuda\nENGINE_PYTHON={__import__('sys').executable}\n"
        assert refused(own, driver) == ""

    @pytest.mark.parametrize(
        ("value", "gpus"),
        [("1", (1,)), ("1,0", (1, 0)), ("GPU-00000001", (1,)), ("GPU-00000000,GPU-00000001", (0, 1))],
    )
    def test_visible_devices_by_number_and_uuid(self, value: str, gpus: tuple[int, ...]) -> None:
        host = machine(card(0), card(1), visible_devices=value)
        made = plan(host=host)
        assert made.gpus == gpus
        # as numbers, since vLLM refuses UUIDs; nothing where it is all of them in order
        numbers = ",".join(map(str, gpus))
        assert made.env.get("CUDA_VISIBLE_DEVICES", "0,1") == numbers

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("7", "there is no GPU 7 here"),
            ("gpu0", "'gpu0' in 'gpu0' is no card"),
            ("GPU-0", "more than one card has the UUID 'GPU-0'"),
            ("GPU-ffff", "no card here has the UUID 'GPU-ffff'"),
            ("0,0", "names a card twice"),
            ("MIG-1", "bwd serves whole cards"),
            ("0,", "'' in '0,' is no card"),
        ],
    )
    def test_garbage_in_visible_devices_is_one_line(self, value: str, says: str) -> None:
        text = refused(host=machine(card(0), card(1), visible_devices=value))
        assert says in text
        assert text.startswith("process environment CUDA_VISIBLE_DEVICES: ")
        assert text.count("\n") == 0

    def test_no_visible_card_is_a_machine_without_one(self) -> None:
        host = machine(card(0), visible_devices="")
        assert choose("auto", host).why == "CUDA_VISIBLE_DEVICES hides every GPU"
        assert "CUDA_VISIBLE_DEVICES hides every GPU" in refused("ENGINE=cuda\n", host)

    def test_extra_env_chooses_cards_over_the_shell(self) -> None:
        host = machine(card(0), card(1), visible_devices="0")
        for line in ("EXTRA_ENV=CUDA_VISIBLE_DEVICES=1\n", "CUDA_VISIBLE_DEVICES=GPU-00000001\n"):
            made = plan(line, host)
            assert made.gpus == (1,)
            assert made.env["CUDA_VISIBLE_DEVICES"] == "1"
        assert refused("PORT=9000\nCUDA_VISIBLE_DEVICES=9\n", host).startswith(
            ".env:2 CUDA_VISIBLE_DEVICES: there is no GPU 9 here"
        )


class TestEnvironment:
    def test_strays_of_a_shell_do_not_reach_the_engine(self) -> None:
        shell = {
            "PATH": "/bin",
            "VLLM_USE_V1": "0",
            "NCCL_P2P_LEVEL": "PCI",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "/daemon",
            "HF_TOKEN": "hf_secret",
            "API_KEY": "secret",
            "CUDA_VISIBLE_DEVICES": "0",
            "BWD_RUN_ID": "r1",
        }
        child = plan().child_env(shell)
        assert child["PATH"] == "/bin"
        assert child["BWD_RUN_ID"] == "r1"
        assert child["PYTHONPATH"] == "/repo/engine_site"
        gone = {"VLLM_USE_V1", "NCCL_P2P_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "HF_TOKEN"}
        assert not (gone | {"API_KEY", "CUDA_VISIBLE_DEVICES"}) & set(child)

    def test_keys_of_the_env_file_reach_the_engine_with_their_origin(self) -> None:
        made = plan("NCCL_DEBUG=INFO\nEXTRA_ENV=VLLM_LOG_STATS_INTERVAL=5\n")
        assert made.env["NCCL_DEBUG"] == "INFO"
        assert origin(made, "NCCL_DEBUG") == ".env:1"
        assert made.env["VLLM_LOG_STATS_INTERVAL"] == "5"
        assert origin(made, "VLLM_LOG_STATS_INTERVAL") == ".env:2"

    def test_no_secret_is_in_it(self) -> None:
        made = plan("HF_TOKEN=hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ\nAPI_KEY=sk-3f9a0c2b7d11\n")
        shown = repr(made) + json.dumps(made.to_dict()) + render(made)
        assert "hf_aBc" not in shown
        assert "sk-3f9a" not in shown

    def test_a_secret_in_extra_env_is_hidden_and_another_one_is_another_plan(self) -> None:
        one = plan("EXTRA_ENV=LMCACHE_TOKEN=abcdef123\n")
        other = plan("EXTRA_ENV=LMCACHE_TOKEN=zzzzzz999\n")
        assert one.env["LMCACHE_TOKEN"] == "abcdef123"
        assert "abcdef123" not in render(one) + json.dumps(one.to_dict())
        assert one.digest != other.digest  # an edit of it has to reach the engine
        assert from_dict(one.to_dict()) is None  # without its secret it is not the same launch

    def test_the_digest_is_that_of_the_launch(self) -> None:
        assert plan().digest == plan("DRAIN_SECONDS=30\n# a comment\n").digest
        assert plan().digest != plan("MAX_NUM_SEQS=8\n").digest
        assert plan("CPU_AFFINITY=1-8\n").digest != plan().digest

    def test_compile_jobs_of_flashinfer_fit_the_memory(self) -> None:
        assert plan().env["MAX_JOBS"] == "16"
        assert plan(host=machine(card(0), card(1), memory_total=16 * GIB)).env["MAX_JOBS"] == "2"
        assert plan("MAX_JOBS=4\n").env["MAX_JOBS"] == "4"


class TestFlags:
    def test_an_r1_model_gets_its_reasoning_parser_and_another_does_not(self) -> None:
        assert flag(plan(), "--reasoning-parser") == "deepseek_r1"
        assert flag(plan("MODEL=demo\n", model=demo()), "--reasoning-parser") is None
        assert flag(plan("REASONING_PARSER=none\n"), "--reasoning-parser") is None
        assert flag(plan("REASONING_PARSER=qwen3\n"), "--reasoning-parser") == "qwen3"

    @pytest.mark.parametrize(
        ("thinks", "parser"), [(True, "deepseek_r1"), (None, "deepseek_r1"), (False, None)]
    )
    def test_a_parser_is_taken_by_itself_only_where_the_tokenizer_has_its_tokens(
        self, thinks: bool | None, parser: str | None
    ) -> None:
        made = plan(model=r1(thinks=thinks))
        assert flag(made, "--reasoning-parser") == parser
        said = [item.reason for item in made.items if item.name == "reasoning parser"]
        assert any("no <think>" in reason for reason in said) is (parser is None)
        asked = plan("REASONING_PARSER=deepseek_r1\n", model=r1(thinks=thinks))
        assert flag(asked, "--reasoning-parser") == "deepseek_r1"

    def test_eager_is_never_a_default_on_a_gpu(self) -> None:
        assert flag(plan(), "--enforce-eager") is None
        assert flag(plan("EXTRA_VLLM_ARGS=--enforce-eager\n"), "--enforce-eager") == ""

    def test_a_flag_stands_once(self) -> None:
        made = plan("EXTRA_VLLM_ARGS=--disable-custom-all-reduce --enforce-eager\n")
        assert made.argv.count("--disable-custom-all-reduce") == 1

    def test_the_name_that_clients_send(self) -> None:
        assert plan().served_model_name == "casperhansen/deepseek-r1-distill-qwen-32b-awq"
        assert plan("SERVED_MODEL_NAME=r1\n").served_model_name == "r1"

    def test_keys_that_are_applied_live_make_no_other_plan(self) -> None:
        live = (
            "DRAIN_SECONDS=77\nHOLD_SECONDS=3\nCANARY_SECONDS=9\nPORT=9000\nHOST=127.0.0.2\nAPI_KEY=sk-1\n"
            "MAX_JOBS=3\nHF_TOKEN=hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ\nHF_ENDPOINT=https://mirror.example\nHF_HOME=/h\n"
        )
        named = {line.partition("=")[0] for line in live.split()}
        assert named == {key.name for key in KEYS.values() if key.change == "live"}
        assert plan(live).digest == plan().digest

    def test_vllm_waits_less_than_bwd_before_the_kill(self) -> None:
        assert int(flag(plan("DRAIN_SECONDS=600\n"), "--shutdown-timeout") or 99) < Policy().grace

    def test_affinity_goes_through_taskset(self) -> None:
        made = plan("CPU_AFFINITY=1-5,25-29\n")
        assert made.argv[:4] == ("taskset", "-c", "1-5,25-29", "/env/bin/python")
        assert made.cpus == (1, 2, 3, 4, 5, 25, 26, 27, 28, 29)
        none = plan()
        assert none.argv[0] == "/env/bin/python"
        assert none.cpus is None

    def test_affinity_that_leaves_nothing_names_key_and_line(self) -> None:
        host = machine(card(0), card(1), cpus_allowed=frozenset(range(8)))
        assert refused("PORT=9000\nCPU_AFFINITY=40-47\n", host) == (
            ".env:2 CPU_AFFINITY: none of CPUs 40-47 may be used here (allowed: 0-7). CPU_AFFINITY=0-7"
        )

    def test_every_problem_is_told_at_once(self) -> None:
        text = refused("MAX_MODEL_LEN=200000\nCPU_AFFINITY=90\nP2P=on\n")
        assert len(text.splitlines()) == 3

    def test_every_line_of_the_plan_has_a_reason(self) -> None:
        for made in (plan(), plan(host=h200s()), make_plan(env(), no_gpu(), demo(), WHERE)):
            assert all(item.reason and item.origin for item in made.items)
            shown = {item.name for item in made.items}
            assert set(made.env) <= shown
            assert {word for word in made.argv if word.startswith("--")} <= shown


class TestMemory:
    def test_utilisation_leaves_what_a_desktop_holds(self) -> None:
        assert flag(plan(), "--gpu-memory-utilization") == "0.90"
        busy = card(0, memory_free=26 * GIB)
        assert flag(plan(host=machine(busy, card(1))), "--gpu-memory-utilization") == "0.80"

    def test_the_engine_that_runs_now_does_not_count(self) -> None:
        ours = GpuProcess(4242, "VLLM::Worker_TP0", 28 * GIB)
        full = [card(i, memory_free=3 * GIB, processes=(ours,)) for i in range(2)]
        made = plan(host=machine(*full), own_pids=frozenset({4242}))
        assert flag(made, "--gpu-memory-utilization") == "0.90"

    @pytest.mark.parametrize(
        "processes",
        [(), (GpuProcess(4242, "", None),), (GpuProcess(4242, "", None), GpuProcess(9, "Xorg", GIB))],
    )
    def test_in_a_container_what_nobody_holds_is_the_engines(self, processes: tuple[GpuProcess, ...]) -> None:
        full = [card(i, memory_free=3 * GIB, processes=processes) for i in range(2)]
        made = plan(host=machine(*full), own_pids=frozenset({4242}))
        assert flag(made, "--gpu-memory-utilization") == "0.90"
        assert "18.0 GiB" not in refused(host=machine(*full), own_pids=frozenset({4242}))
        assert refused(host=machine(*full)) != ""

    def test_what_another_holds_stays_held(self) -> None:
        ours, other = GpuProcess(4242, "", 20 * GIB), GpuProcess(9, "comfyui", 8 * GIB)
        full = [card(i, memory_free=3 * GIB, processes=(ours, other)) for i in range(2)]
        made = plan(host=machine(*full), own_pids=frozenset({4242}))
        assert flag(made, "--gpu-memory-utilization") == "0.70"

    def test_a_full_card_names_its_owner(self) -> None:
        other = GpuProcess(77, "comfyui", 27 * GIB)
        host = machine(card(0, memory_free=4 * GIB, processes=(other,)), card(1))
        text = refused(host=host)
        assert text.startswith("GPU 0: 4.0 GiB of 31.4 GiB are free")
        assert "comfyui (pid 77, 27.0 GiB)" in text

    def test_a_model_that_fits_no_number_of_cards_here(self) -> None:
        text = refused(model=r1(weight_bytes=66 * GIB, quant_method=None, group_size=None))
        assert "33.0 GiB of weights a card do not fit 31.4 GiB" in text
        assert "4-bit (AWQ)" in text

    def test_one_card_suffices_for_the_default_model(self) -> None:
        made = plan(host=machine(card(0)))
        assert made.tensor_parallel_size == 1
        assert made.max_model_len is not None
        assert 16384 <= made.max_model_len <= 32768

    def test_auto_length_is_what_fits(self) -> None:
        made = plan("MAX_MODEL_LEN=auto\n", machine(card(0)))
        assert made.max_model_len is not None
        assert made.max_model_len % 256 == 0
        assert made.max_model_len < 131072
        assert plan("MAX_MODEL_LEN=auto\n", h200s()).max_model_len == 131072
        assert plan(host=h200s()).max_model_len == 32768

    def test_a_set_length_that_cannot_fit_is_refused_with_one_that_does(self) -> None:
        text = refused("MAX_MODEL_LEN=131072\n", machine(card(0)))
        assert text.startswith(".env:1 MAX_MODEL_LEN: the KV cache of 131072 tokens does not fit")
        value = text.rsplit("MAX_MODEL_LEN=", 1)[1]
        assert refused(f"MAX_MODEL_LEN={value}\n", machine(card(0))) == ""


class TestCpuEngine:
    def cpu(self, text: str = "", **changes: object) -> object:
        return make_plan(env(text), no_gpu(**changes), demo(), WHERE)

    def test_the_fastest_sane_launch(self) -> None:
        made = make_plan(env(), no_gpu(), demo(), WHERE)
        assert (made.engine, made.gpu_class, made.tensor_parallel_size) == ("cpu", "none", 1)
        assert flag(made, "--enforce-eager") == ""
        assert flag(made, "--kv-cache-memory-bytes") == str(GIB)
        assert flag(made, "--max-model-len") == "8192"
        assert made.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert made.env["OMP_NUM_THREADS"] == "2"
        assert made.env["PYTHONPATH"] == "/repo/engine_site:/repo/engine_site/cpu"
        assert not [name for name in made.env if name.startswith(("NCCL_", "CUDA_"))]
        assert made.served_model_name == "demo"

    def test_bfloat16_is_not_run_on_amx(self) -> None:
        """Measured: vLLM 0.32.0's AMX attention answers wrongly in bfloat16."""
        assert flag(make_plan(env(), no_gpu(cpu_amx=True), demo(), WHERE), "--dtype") == "float32"
        awq = demo(dtype="bfloat16", quant_method="awq")
        assert flag(make_plan(env(), no_gpu(cpu_amx=True), awq, WHERE), "--dtype") == "float16"
        for host, model in ((no_gpu(), demo()), (no_gpu(cpu_amx=True), demo(dtype="float16"))):
            assert "--dtype" not in make_plan(env(), host, model, WHERE).argv
        asked = make_plan(env("DTYPE=bfloat16\n"), no_gpu(cpu_amx=True), demo(), WHERE)
        assert flag(asked, "--dtype") == "bfloat16"
        assert any("answers wrongly" in warning for warning in asked.warnings)

    def test_two_ranks_share_the_cpus_and_keep_their_workers(self) -> None:
        made = make_plan(env("TENSOR_PARALLEL_SIZE=2\n"), no_gpu(), demo(), WHERE)
        assert flag(made, "--tensor-parallel-size") == "2"
        assert made.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
        assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"} & set(made.env)

    def test_more_ranks_than_cpus_are_refused(self) -> None:
        with pytest.raises(Exception, match="4 CPU workers need a CPU each, 2 may be used"):
            make_plan(env("TENSOR_PARALLEL_SIZE=4\n"), no_gpu(), demo(), WHERE)

    def test_the_kv_cache_never_takes_more_than_a_quarter_of_free_memory(self) -> None:
        made = make_plan(env(), no_gpu(memory_available=2 * GIB), demo(), WHERE)
        assert flag(made, "--kv-cache-memory-bytes") == str(GIB // 2)
        tiny = make_plan(env(), no_gpu(memory_available=GIB // 2), demo(), WHERE)
        assert tiny.max_model_len is not None
        assert tiny.max_model_len < 8192

    def test_a_length_beyond_the_kv_cache_is_refused_with_one_that_fits(self) -> None:
        host = no_gpu(memory_available=GIB // 2)
        with pytest.raises(
            Exception, match=r"\.env:1 MAX_MODEL_LEN: 8192 tokens need more .*\. MAX_MODEL_LEN="
        ):
            make_plan(env("MAX_MODEL_LEN=8192\n"), host, demo(), WHERE)

    def test_a_length_beyond_the_model_is_refused_once(self) -> None:
        with pytest.raises(PlanError) as caught:
            make_plan(env("MAX_MODEL_LEN=99999\n"), no_gpu(), demo(), WHERE)
        assert [problem.hint for problem in caught.value.problems] == ["MAX_MODEL_LEN=8192"]

    def test_affinity_limits_the_threads(self) -> None:
        made = make_plan(env("CPU_AFFINITY=1\n"), no_gpu(), demo(), WHERE)
        assert made.argv[:3] == ("taskset", "-c", "1")
        assert made.env["OMP_NUM_THREADS"] == "1"

    def test_keys_for_cards_are_named_as_without_effect(self) -> None:
        made = make_plan(env("ATTENTION_BACKEND=FLASHINFER\n"), no_gpu(), demo(), WHERE)
        assert "ATTENTION_BACKEND=FLASHINFER has no effect on the CPU engine" in made.warnings
        assert flag(made, "--attention-backend") is None

    def test_a_model_larger_than_the_memory_is_refused(self) -> None:
        with pytest.raises(Exception, match=r"MODEL: 60\.0 GiB of weights do not fit 24\.0 GiB"):
            make_plan(env(), no_gpu(), demo(weight_bytes=60 * GIB), WHERE)

    def test_compiling_on_a_cpu_can_be_asked_for(self) -> None:
        made = make_plan(env("EXTRA_VLLM_ARGS=--no-enforce-eager\n"), no_gpu(), demo(), WHERE)
        assert "--enforce-eager" not in made.argv
        assert made.env["VLLM_USE_AOT_COMPILE"] == "0"
