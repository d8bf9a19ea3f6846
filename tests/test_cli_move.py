"""`meshweave move`: what it prints, its JSON and its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from meshweave.cli import app

PROFILE = "alpha=10e-6,a=50e9,b=400e9"
LARGE = ("--mesh", "a=4,b=8", "--shape", "4096,4096", "--profile", PROFILE)


def call(*arguments):
    return CliRunner().invoke(app, ["move", *(str(a) for a in arguments)])


def answer(result):
    return json.loads(result.stdout.splitlines()[-1])


def test_the_plan_and_its_bound():
    result = call("[{}, {b}]", "[{a,b}, {}]", *LARGE)
    assert result.exit_code == 0, result.output
    assert "float32 [4096, 4096] on a=4,b=8\n[{}, {b}] -> [{a,b}, {}]: 2 steps" in result.output
    assert "slice dim 0 over a" in result.output
    assert "all_to_all over b from dim 1 onto dim 0" in result.output
    assert ", at best " in result.output
    assert "exact" in result.output


def test_the_same_as_json():
    result = call("[{}, {}] partial(sum: a,b)", "[{}, {}]", *LARGE, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1, "everything else goes to stderr"
    held = answer(result)
    assert (held["command"], held["ok"], held["numerics"]) == ("move", True, "reassociates")
    assert held["seconds"] == pytest.approx(sum(step["seconds"] for step in held["steps"]))
    assert held["bytes_received"] == sum(step["bytes_received"] for step in held["steps"])
    assert 0 < held["lower_bound_seconds"] <= held["seconds"]
    assert held["steps"][-1]["target"] == "[{}, {}]"


def test_nothing_to_do():
    result = call("[{a}, {}]", "[{a}, {}]", *LARGE)
    assert result.exit_code == 0, result.output
    assert result.output.count("nothing to do") == 1


def test_another_mesh():
    result = call("[{a}, {}]", "[{}, {c}]", "--mesh", "a=4", "--to-mesh", "c=2 on [4, 5]", "--shape", "64,64", "--json")
    assert result.exit_code == 0, result.output
    held = answer(result)
    assert [step["kind"] for step in held["steps"]] == ["transfer"]
    assert held["bytes_received"] == 64 * 32 * 4
    assert "on a=4 -> c=2 on [4, 5]" in result.stderr


def test_a_value_on_one_device():
    result = call("[]", "[]", "--mesh", "", "--shape", "", "--json")
    assert result.exit_code == 0, result.output
    assert answer(result)["steps"] == []
    assert "on one device" in result.stderr


def test_one_bandwidth_for_all_axes():
    held = answer(call("[{a}, {}]", "[{}, {}]", "--mesh", "a=2", "--shape", "8,8", "--profile", "alpha=1,64", "--json"))
    assert held["seconds"] == 1 + 128 / 64
    usual = answer(call("[{a}, {}]", "[{}, {}]", "--mesh", "a=2", "--shape", "8,8", "--json"))
    assert usual["seconds"] == pytest.approx(10e-6 + 128 / 50e9)


def test_dtype_and_cap_are_heeded():
    arguments = ("[{}, {}] partial(sum: a)", "[{}, {}]", *LARGE, "--dtype", "bfloat16", "--json")
    assert answer(call(*arguments))["peak_bytes"] <= 2**26, "twice a piece of bfloat16"
    arguments = ("[{a}, {}]", "[{}, {a}]", "--mesh", "a=4,b=8", "--shape", "64,64", "--json")
    free, capped = answer(call(*arguments)), answer(call(*arguments, "--memory-cap", 5000))
    assert (len(free["steps"]), free["peak_bytes"]) == (1, 8192)
    assert capped["peak_bytes"] <= 5000
    assert len(capped["steps"]) > 1


SMALL = ("--mesh", "a=2", "--shape", "4,4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("[{q}, {}]", "[{}, {}]", *SMALL), "the mesh has no axis 'q'"),
        (("[{a}, {}, {}]", "[{}, {}]", *SMALL), "differ in their number of dims"),
        (("[{a", "[{}, {}]", *SMALL), "this is not a layout"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--memory-cap", 10), "96 bytes or more"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--memory-cap", -1), "greater than or equal to 0"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--profile", "q=3"), "no mesh has an axis 'q'"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--profile", "a=fast"), "not a profile"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--profile", "a=0"), "more than 0 bytes per second"),
        (("[{a}, {}]", "[{}, {}]", "--mesh", "a=2,b=2", "--shape", "4,4", "--profile", "b=1"), "no bandwidth for axis"),
        (("[{a}, {}]", "[{}, {}]", "--mesh", "a=2", "--shape", "4,x"), "not a shape"),
        (("[{a}, {}]", "[{}, {}]", *SMALL, "--dtype", "nn"), "not a dtype"),
        (("[{a}, {}]", "[{}, {}]", "--mesh", "a=two", "--shape", "4,4"), "name=size"),
        (("[{}, {}] partial(avg: a)", "[{}, {}]", *SMALL, "--dtype", "int64"), "average of integers"),
    ],
)
def test_bad_input(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_errors_are_json_too():
    held = answer(call("[{q}, {}]", "[{}, {}]", *SMALL, "--json"))
    assert (held["command"], held["ok"], held["error"]["kind"]) == ("move", False, "MeshError")
