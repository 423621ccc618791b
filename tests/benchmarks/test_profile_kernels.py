"""The table made of ncu's output, on a sample in its format, and the command that runs ncu."""

import re
import textwrap
from pathlib import Path

import profile_kernels
import pytest

HEADINGS = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block'
    ' Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
BEFORE = '"7","python3.12","127.0.0.1"'
SHAPE = '"1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics"'


def sample(launches: list[tuple[str, dict[str, tuple[str, str]]]]) -> str:
    lines = [
        f'"{i}",{BEFORE},"{kernel}",{SHAPE},"{metric}","{unit}","{value}"'
        for i, (kernel, metrics) in enumerate(launches)
        for metric, (unit, value) in metrics.items()
    ]
    noise = [
        "==PROF== Connected to process 7 (/usr/bin/python3.12)",
        "profiling attention",
        "==PROF== Disconnected from process 7",
    ]
    return "\n".join([*noise, HEADINGS, *lines]) + "\n"


def metrics(microseconds: str, unit: str = "usecond", **stalls: str) -> dict[str, tuple[str, str]]:
    figures = profile_kernels.FIGURES
    return {
        figures["µs"]: (unit, microseconds),
        figures["tensor pipe %"]: ("%", "61.5"),
        figures["DRAM %"]: ("%", "30"),
        figures["L2 %"]: ("%", "n/a"),
        figures["registers"]: ("register/thread", "168"),
        **{
            profile_kernels.STALL.format(reason): ("inst", value)
            for reason, value in stalls.items()
        },
    }


def test_medians_of_the_launches_and_the_longest_stalls():
    stalls = {"barrier": "0.25", "long_scoreboard": "1.50", "gmma": "2", "wait": "0.5"}
    launches = [
        ("fwd_kernel", metrics(value, **stalls)) for value in ("1,200.5", "1,000.0", "1,100.0")
    ]
    launches.append(("bwd_kernel", metrics("2.5", "msecond", wait="1")))
    forward, backward = profile_kernels.parse(sample(launches))
    assert (
        forward["kernel"] == "fwd_kernel" and forward["µs"] == 1100.0 and backward["µs"] == 2500.0
    )
    assert (forward["tensor pipe %"], forward["L2 %"], forward["occupancy %"]) == (61.5, None, None)
    assert list(forward["stalls"]) == ["gmma", "long_scoreboard", "wait", "barrier"]
    lines = profile_kernels.markdown([forward, backward])
    assert (
        "| `fwd_kernel` | 1100 | 61.5 | 30 | – | – | 168 | gmma 2.00, long scoreboard 1.50, wait"
        " 0.50 |" in lines
    )
    assert lines[-1].endswith("| wait 1.00 |")


def test_output_without_a_table_is_an_error():
    with pytest.raises(ValueError, match="no output of ncu"):
        profile_kernels.parse(
            "==ERROR== The user does not have permission to access NVIDIA GPU Performance"
            " Counters\n"
        )


def test_the_command_asks_for_every_metric_and_leaves_the_clocks_alone(tmp_path):
    command = profile_kernels.ncu_command(tmp_path / "profile.csv")
    assert (
        command[0] == "ncu"
        and command[-1] == "--launch"
        and Path(command[-2]).samefile(profile_kernels.__file__)
    )
    assert command[command.index("--clock-control") + 1] == "none"
    asked = command[command.index("--metrics") + 1].split(",")
    assert set(profile_kernels.FIGURES.values()) <= set(asked) and len(asked) == len(set(asked))


def test_every_launch_runs():
    calls = profile_kernels.kernels("cpu", tiny=True)
    assert len(calls) == 5 and all(call() is not None for call in calls.values())


def test_kernel_names_match_those_of_the_project():
    kernels = Path(profile_kernels.__file__).parents[1] / "jagged_kernels"
    names = {
        name
        for path in kernels.rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    profiled = {name for name in names if re.search(profile_kernels.KERNELS, name)}
    expected = textwrap.dedent("""
        attention_fwd_hopper_kernel attention_bwd_dq_hopper_kernel attention_bwd_dkdv_hopper_kernel linear_compress_fwd_hopper_kernel
        block_attention_fwd_hopper_kernel block_attention_bwd_hopper_kernel
        """).split()  # noqa: E501
    assert set(expected) <= profiled and all(
        "tile" not in name and "softmax" not in name for name in profiled
    )
