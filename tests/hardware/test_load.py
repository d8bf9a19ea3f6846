"""Profiles from files: all of the package load, and what is wrong in one is named with file and field."""

import pickle
import re
from pathlib import Path

import pytest

from meshweave.cost.hardware import load_profile, profile_names
from meshweave.cost.hardware.load import _DATA, parse_profile
from meshweave.errors import MeshweaveError

H100 = (_DATA / "h100.toml").read_text(encoding="utf-8")


def changed(old: str, new: str) -> str:
    assert H100.count(old) == 1, old
    return H100.replace(old, new)


def refused(text: str) -> str:
    with pytest.raises(MeshweaveError) as error:
        parse_profile(text, "machine.toml")
    return str(error.value)


def test_the_profiles_of_the_package_load_under_their_names() -> None:
    assert profile_names() == ("a100", "b200", "b300", "cpu-gloo", "gb200", "gb300", "h100", "h100-500w", "h200")
    for name in profile_names():
        profile = load_profile(name)
        assert (profile.name, profile.source) == (name, "modelled")
        assert load_profile(name) is profile
        assert pickle.loads(pickle.dumps(profile)) == profile
        assert 0 < profile.usable_bytes < profile.memory.bytes
    assert load_profile("h100").usable_bytes == pytest.approx((84.93e9 - 2e9) * 0.97)


def unsourced(text: str) -> list[int]:
    """Lines with a figure that have no comment: neither they, nor the line above, nor a table that they are in."""
    sourced: set[str] = set()
    table, above, found = "", False, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("["):
            table = line.split("]")[0].strip("[")
            if above or "#" in line:
                sourced.add(table)
        elif re.match(r"\w+ = [-\d\[]", line):
            tables = [table[: match.start()] for match in re.finditer(r"\.|$", table)]
            if not (above or "#" in line or sourced & set(filter(None, tables))):
                found.append(number)
        above = line.startswith("#")
    return found


def test_every_figure_of_the_package_has_a_source() -> None:
    for name in profile_names():
        assert unsourced((_DATA / f"{name}.toml").read_text(encoding="utf-8")) == [], name
    assert unsourced("# all\n[a]\nb = 1\n[a.c]\nd = 2\n[e]\nf = 3\ng = [4]  # paper\n") == [7]


def test_a_file_loads_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(changed('name = "h100"', 'name = "mine"'), encoding="utf-8")
    assert load_profile(path) == load_profile(str(path))
    assert load_profile(path) != load_profile("h100")
    assert load_profile(path).links == load_profile("h100").links


def test_an_unknown_name_has_near_misses() -> None:
    with pytest.raises(MeshweaveError) as error:
        load_profile("h10")
    assert "unknown machine profile 'h10'" in str(error.value)
    assert "did you mean h100 or h200 or a100?" in str(error.value)
    with pytest.raises(MeshweaveError, match=r"the machine profile cannot be read\n  where: none/there.toml"):
        load_profile("none/there.toml")


@pytest.mark.parametrize(
    ("old", "new", "what", "expected"),
    [
        ("\nwatts = 700 ", "\nwatts = -700 ", "'power.watts' is out of range", "a number above 0"),
        ("launch_s = 3e-6 ", "launch_s = nan ", "'launch_s' is out of range", "seconds, 0 or more"),
        ("launch_s = 3e-6 ", 'launch_s = "3us" ', "'launch_s' is not a number", "seconds, 0 or more"),
        ("bfloat16 = 0.72 ", "bfloat16 = 1.2 ", "'matmul.sustained.bfloat16' is out of range", "share"),
        ("devices_per_node = 8", "devices_per_node = 7.5", "'devices_per_node' is out of range", "whole"),
        ('fusion = "pointwise"', 'fusion = "all"', "'fusion' is not an allowed value", "one of pointwise, none"),
        ("bandwidth = 450e9", "bandwith = 450e9", "'links.node.bandwith' is unknown", "one of bandwidth"),
        ("float64 = 66.9e12 ", "float65 = 66.9e12 ", "'peak.float65' is unknown", "one of bfloat16"),
        ('kernel = "flash2"', "kernel = 2", "'attention.kernel' is not an allowed value", "text"),
        ("static_watts = 100 ", "static_watts = 700 ", "'power.static_watts' is out of range", "less than watts"),
        ("ll_cap = [141e9, 45e9, 35e9]", "ll_cap = [141e9, 45e9]", "'nccl.ll_cap' has a row of another", "[1 node"),
        ("[128, 128, 0.9]", "[0, 128, 0.9]", "'matmul.tiles[2][0]' is out of range", "rows, 1 or more"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_field(old: str, new: str, what: str, expected: str) -> None:
    message = refused(changed(old, new))
    assert what in message
    assert "where: machine.toml" in message
    assert expected in message


def test_a_misspelt_field_has_a_near_miss() -> None:
    assert "hint: did you mean 'bandwidth'?" in refused(changed("bandwidth = 450e9", "bandwith = 450e9"))


def test_a_missing_field_is_named_at_its_table() -> None:
    text = changed("bandwidth = 450e9          # data sheet: 18 NVLink 4 links of 25 GB/s per direction\n", "")
    assert "'links.node.bandwidth' is missing" in refused(text)
    assert "'version' is missing\n  where: machine.toml" in refused(changed('version = "2026.1"\n', ""))


def test_text_that_is_not_toml_has_the_line_of_the_parser() -> None:
    assert "the machine profile is not TOML\n  where: machine.toml\n  got: " in refused("name = \n")
    assert "line 1" in refused("name = \n")


def test_a_curve_that_falls_is_refused_in_its_row() -> None:
    text = H100 + (
        '\n[[collectives]]\nop = "all_gather"\nlevel = "node"\ngroup_size = 2\n'
        "points = [\n  [0, 1e-5],\n  [10, 2e-5],  # [\n  [20, 1e-5],\n]\n"
    )
    assert "'collectives[0].points[2]' does not rise" in refused(text)
