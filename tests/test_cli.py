"""The command line: what it prints, its JSON and its exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import meshweave
from meshweave.cli import app
from meshweave.cli.command import Options, add_command, argument, option
from meshweave.errors import PlanError
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import data_parallel_size, parse_plan
from meshweave.place.plans import Plan

ROOT = Path(meshweave.__file__).parents[2]
TINY = "hf:llama?hidden_size=16&num_hidden_layers=2&num_attention_heads=2&intermediate_size=32&vocab_size=64"
MODELS = '''
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Strange(Net):
    def forward(self, x):
        out = super().forward(x)
        return torch.as_strided_copy(out, (2, 2), (2, 1))

class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x)

def batches(batch):
    return lambda i: {"x": torch.full((batch, 4), i + 1.0) + torch.arange(4)}

def mean(out, batch):
    return (out * out).mean()

def good(batch: int = 4):
    return Net(), batches(batch), mean

def strange(batch: int = 4):
    return Strange(), batches(batch), mean

def branch(batch: int = 4):
    return Branch(), batches(batch), mean

def nan(batch: int = 4):
    return Net(), lambda i: {"x": torch.full((batch, 4), float("nan") if i == 2 else 1.0)}, mean

def slow(batch: int = 4):
    import time
    def make(i):
        time.sleep(0.05)
        return batches(batch)(i)
    return Net(), make, mean
'''  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def answer(result):
    return json.loads(result.stdout.splitlines()[-1])


def test_run_trains_and_reports(models):
    result = call("run", f"{models}:good", "--mesh", "dp=2,tp=2", "--steps", 3, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1, "everything else goes to stderr"
    held = answer(result)
    assert held["command"] == "run"
    assert held["ok"] is True
    assert held["num_devices"] == 4
    assert len(held["losses"]) == 3
    assert held["losses"][-1] == held["loss"]
    assert "step 3/3" in result.stderr


def test_run_says_the_same_losses_on_any_mesh(models):
    results = [answer(call("run", f"{models}:good", "--mesh", m, "--steps", 3, "--json")) for m in ("", "dp=2", "tp=2")]
    for other in results[1:]:
        assert other["losses"] == pytest.approx(results[0]["losses"], rel=1e-6)


@pytest.mark.parametrize("option", ["--checkpoint", "--report"])
def test_run_tries_where_it_will_write_before_it_trains(models, tmp_path, option):
    (tmp_path / "file").write_text("a file")
    result = call("run", f"{models}:good", "--steps", 2, option, tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "the file cannot be written" in result.output
    assert "step 1" not in result.output
    assert "capture" not in result.output


def test_run_continues_from_its_checkpoint(models, tmp_path):
    place = tmp_path / "ckpt"
    arguments = ("run", f"{models}:good", "--lr", "0.01", "--json")
    whole = answer(call(*arguments, "--mesh", "dp=2", "--steps", 6))
    first = answer(call(*arguments, "--mesh", "dp=2", "--steps", 3, "--checkpoint", place))
    rest = answer(call(*arguments, "--mesh", "tp=2", "--steps", 6, "--checkpoint", place, "--save-every", 2))
    assert rest["first_step"] == 3
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    again = call(*arguments, "--steps", 6, "--checkpoint", place)
    assert again.exit_code == 0
    assert answer(again)["losses"] == []
    assert "nothing to do" in again.stderr


def test_check_passes_and_shows_the_worst_tensors(models):
    result = call("check", f"{models}:good", "--mesh", "dp=2,tp=2", "--batch", 6)
    assert result.exit_code == 0, result.output
    assert "equal" in result.output
    assert "up.weight" in result.output or "down.weight" in result.output


@pytest.mark.slow
def test_check_of_a_hugging_face_model():
    result = call(
        "check", TINY, "--mesh", "dp=2,tp=2", "--plan", "fsdp:dp+hf_tp:tp", "--seq", 16, "--steps", 2, "--json"
    )
    assert result.exit_code == 0, result.output
    held = answer(result)
    assert held["ok"] is True
    assert held["num_failed"] == 0
    assert len(held["losses"]["mesh"]) == 2


@pytest.mark.slow_rows("pp=2,dp=2-adamw-2")
@pytest.mark.parametrize(
    ("mesh", "optimizer", "steps"),
    [("pp=2,dp=2", "adamw", 2), pytest.param("pp=2,tp=2", "sgd", 10, marks=pytest.mark.slow)],
)
def test_check_of_layers_on_different_devices_proves_and_compares(mesh, optimizer, steps):
    result = call("check", TINY, "--mesh", mesh, "--seq", 16, "--steps", steps, "--optimizer", optimizer, "--json")
    assert result.exit_code == 0, result.output
    held = answer(result)
    assert (held["num_failed"], held["steps"]) == (0, steps)
    assert held["complete"]["num_roles"] == 2
    assert held["complete"]["num_devices"] == 4
    assert held["complete"]["num_communications"] == held["deadlock"]["num_communications"] > 5
    assert "free of deadlock" in result.stderr


def test_check_says_which_communication_a_program_lacks(models, monkeypatch):
    """A compiler that forgets to wait for other devices is caught before anything runs."""
    from meshweave.cli import job
    from meshweave.ir.collectives import functional

    build = job.build_program

    def forgetful(*arguments, **options):
        program = build(*arguments, **options)
        for rank in program.roles:
            for node in [n for n in rank.graph.nodes if n.target is functional.all_reduce.default][:1]:
                (wait,) = node.users
                wait.replace_all_uses_with(node.args[0])
                rank.graph.erase_node(wait)
                rank.graph.erase_node(node)
        return program

    monkeypatch.setattr(job, "build_program", forgetful)
    result = call("check", f"{models}:good", "--mesh", "dp=2", "--json")
    assert result.exit_code == 1
    assert answer(result)["error"]["kind"] == "VerifyError"
    assert "models.py:" in result.stderr


def test_a_check_that_fails_exits_with_1(models, monkeypatch):
    from meshweave.check.numerics import Bounds

    monkeypatch.setattr(Bounds, "under", staticmethod(lambda autocast: Bounds(loss=-1.0)))
    result = call("check", f"{models}:good", "--mesh", "dp=2", "--steps", 1, "--json")
    assert result.exit_code == 1
    held = answer(result)
    assert held["ok"] is False
    assert held["num_failed"] == 2
    assert "FAIL" in result.stderr


@pytest.mark.slow
def test_plan_folds_the_twins_of_layers():
    arguments = ("plan", TINY, "--mesh", "dp=2,tp=2", "--plan", "fsdp:dp+hf_tp:tp", "--seq", 16, "--json")
    folded, every = call(*arguments), call(*arguments, "--all")
    assert folded.exit_code == every.exit_code == 0, folded.output
    few, all_ = answer(folded), answer(every)
    assert few["num_moves"] == all_["num_moves"] == len(all_["moves"]) == sum(m["count"] for m in few["moves"])
    assert len(few["moves"]) < 0.7 * len(all_["moves"])
    assert few["bytes_received"] == sum(t["bytes_received"] for t in few["totals"])
    gathered = [m for m in few["moves"] if m["kind"] == "all_gather" and "self_attn.q_proj" in m["module"]]
    assert {m["phase"] for m in gathered} == {"forward", "backward"}
    assert {m["count"] for m in gathered} == {2}
    assert "model.layers.*.self_attn.q_proj.weight" in folded.stderr
    assert "modeling_llama.py:" in folded.stderr


def test_plan_of_a_large_model_allocates_nothing():
    huge = "hf:llama?hidden_size=16384&num_hidden_layers=1&num_attention_heads=128&intermediate_size=53248"
    result = call("plan", huge, "--mesh", "dp=64,tp=8", "--plan", "fsdp:dp+hf_tp:tp", "--json")
    assert result.exit_code == 0, result.output
    assert answer(result)["bytes_received"] > 2**30


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("MODELS:good", "--mesh", "dp=2,dp=2"), 2, "axis 'dp' is named twice"),
        (("MODELS:good", "--mesh", "dp=two"), 2, "dp=two"),
        (("MODELS:good", "--mesh", "dp=2", "--plan", "fdsp:dp"), 2, "expected: fsdp"),
        (("MODELS:good", "--mesh", "dp=2", "--plan", "fsdp:pd"), 2, "no axis 'pd'"),
        (("MODELS:good", "--mesh", "zz=2"), 2, "axis 'zz' has no usual meaning"),
        (("MODELS:good", "--mesh", "tp=2", "--plan", "hf_tp:tp"), 2, "no Hugging Face tp plan"),
        (("MODELS:good", "--batch", "4", "--local-batch", "2"), 2, "say the same thing"),
        (("MODELS:good", "--mesh", "dp=2", "--accumulate", "3"), 2, "does not divide"),
        (("MODELS:goood",), 2, "expected: good"),
        (("MODELS:strange", "--mesh", "dp=2"), 2, "as_strided_copy"),
        (("MODELS:branch",), 2, "control flow depends on data"),
        (("hf:lama",), 2, "expected: llama"),
        (("hf:llama?hidden_sise=3",), 2, "expected: hidden_size"),
        (("MODELS:nan", "--steps", "4"), 1, "the loss of step 3 is nan"),
        (("MODELS:good", "--steps", "0"), 2, "greater than or equal to 1"),
    ],
)
def test_bad_input(models, arguments, code, message):
    result = call("run", *(a.replace("MODELS", str(models)) for a in arguments))
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_errors_are_json_too(models):
    result = call("run", f"{models}:good", "--mesh", "dp=2,dp=2", "--json")
    held = answer(result)
    assert held["ok"] is False
    assert held["error"]["kind"] == "MeshError"
    assert "named twice" in held["error"]["what"]


def test_debug_shows_the_traceback(models):
    result = call("run", f"{models}:good", "--mesh", "dp=2,dp=2", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.output


@pytest.mark.slow_rows('plan.toml-plan = "dp:dp"\\n"up.weight" = "[{tp}, {}]"\\n"down" = "rowwise:tp"\\n')
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.toml", 'plan = "dp:dp"\n"up.weight" = "[{tp}, {}]"\n"down" = "rowwise:tp"\n'),
        ("plan.json", '{"plan": "dp:dp", "up.weight": "[{tp}, {}]", "down": "rowwise:tp"}'),
    ],
)
def test_a_plan_file(models, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    plan = parse_plan(str(tmp_path / name))
    assert plan == Plan.dp("dp") + Plan({"up.weight": "[{tp}, {}]"}) + Plan.tp("tp", {"down": "rowwise"})
    result = call("check", f"{models}:good", "--mesh", "dp=2,tp=2", "--plan", tmp_path / name, "--steps", 1)
    assert result.exit_code == 0, result.output


def test_a_plan_that_matches_nothing_shows_near_misses(models, tmp_path):
    (tmp_path / "plan.json").write_text('{"plan": "dp:dp", "upp.weight": "[{tp}, {}]"}')
    result = call("run", f"{models}:good", "--mesh", "dp=2,tp=2", "--plan", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "up.weight" in result.output.replace("upp.weight", "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "up.weight = 3\n", "maps globs to layouts"),
        ("a.json", "[1]", "maps globs to layouts"),
        ("a.json", "{", "cannot be read"),
        ("missing.toml", None, "cannot be read"),
    ],
)
def test_bad_plan_files(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=message):
        parse_plan(str(tmp_path / name))


def test_the_batch_is_per_data_parallel_device():
    mesh = Mesh("dp=2,fsdp=3,tp=4")
    assert data_parallel_size(mesh, None) == 6
    assert data_parallel_size(mesh, parse_plan("fsdp:tp")) == 4
    assert data_parallel_size(Mesh(""), None) == 1
    assert parse_plan("") is None
    assert parse_plan("fsdp:dp+hf_tp:tp+sequence:tp") == Plan.fsdp("dp") + Plan.hf_tp("tp") + Plan.sequence_parallel(
        "tp"
    )


# the table of options


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting(Options):
    name: str = argument("NAME", "who")
    times: int = option(1, "how often", min=1)
    also: list[str] = option(list, "others")


def test_a_field_of_the_options_is_all_that_an_option_takes():
    def greet(screen, asked):
        """Say hello."""
        screen.result(True, line=" ".join([asked.name, *asked.also] * asked.times))
        return 1

    greeter = typer.Typer()
    add_command(greeter, "greet", Greeting, greet)
    result = CliRunner().invoke(greeter, ["Ada", "--also", "Bob", "--times", "2", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"command": "greet", "ok": True, "line": "Ada Bob Ada Bob"}
    assert CliRunner().invoke(greeter, ["Ada", "--times", "0"]).exit_code == 2
    text = CliRunner().invoke(greeter, ["--help"]).output
    assert "Say hello." in text
    assert text.index("--times") < text.index("--also") < text.index("--json") < text.index("--debug")


@pytest.mark.parametrize("name", ["run", "check", "plan", "explain", "simulate", "move", "calibrate"])
def test_help_fits_80_columns_and_explains_every_option(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = call(name, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    (group,) = [c for n, c in typer.main.get_command(app).commands.items() if n == name]
    for parameter in group.params:
        assert parameter.help, parameter.name
        assert parameter.opts[0] in result.output or parameter.metavar in result.output
    assert {"json", "debug"} <= {parameter.name for parameter in group.params}


# as a process


def command(*arguments, torchrun=0):
    launcher = ["torch.distributed.run", f"--nproc-per-node={torchrun}", "--standalone", "-m"] if torchrun else []
    line = [sys.executable, *([] if torchrun else ["-W", "error"]), "-m", *launcher, "meshweave", *map(str, arguments)]
    return line, {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*arguments, torchrun=0):
    """A process that Ctrl-C reaches, even where a shell had it ignored for the tests; ended when the block ends."""
    line, environment = command(*arguments, torchrun=torchrun)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun passes it on


def finished(*arguments, torchrun=0):
    with started(*arguments, torchrun=torchrun) as process:
        out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def await_line(process, text):
    lines = []
    while text not in (line := process.stderr.readline()):
        lines.append(line)
        assert process.poll() is None, "".join(lines)


@pytest.mark.slow
def test_the_process_exits_with_the_code(models):
    code, out, err = finished("run", f"{models}:good", "--mesh", "dp=2", "--steps", 2, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["ok"] is True


def interrupt(models, place, torchrun=0):
    arguments = ("run", f"{models}:slow", "--mesh", "dp=2", "--steps", 100000, "--checkpoint", place, "--json")
    with started(*arguments, torchrun=torchrun) as process:
        await_line(process, " 1/100000 ")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert json.loads(out.splitlines()[-1])["ok"] is False
    saved = int(err.split("saved step ")[1].split()[0])
    rest = answer(
        call("run", f"{models}:good", "--mesh", "dp=2", "--steps", saved + 2, "--checkpoint", place, "--json")
    )
    assert rest["first_step"] == saved
    assert len(rest["losses"]) == 2
    return process.returncode, err


@pytest.mark.slow
def test_ctrl_c_saves_the_last_completed_step(models, tmp_path):
    code, err = interrupt(models, tmp_path / "ckpt")
    assert code == 130, err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ctrl_c_under_torchrun_saves_on_all_ranks_after_the_same_step(models, tmp_path):
    code, _ = interrupt(models, tmp_path / "ckpt", torchrun=2)
    assert code != 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_checks_on_real_processes():
    code, out, err = finished("check", TINY, "--mesh", "dp=2", "--seq", 16, "--steps", 1, "--json", torchrun=2)
    assert code == 0, err
    assert len(out.splitlines()) == 1, "only the first rank speaks"
    assert json.loads(out)["ok"] is True


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("mesh", "count"), [("pp=2", 2), ("pp=2,tp=2", 4)])
def test_torchrun_checks_layers_on_different_processes(mesh, count):
    code, out, err = finished("check", TINY, "--mesh", mesh, "--seq", 16, "--steps", 2, "--json", torchrun=count)
    assert code == 0, err
    held = json.loads(out)
    assert (held["ok"], held["complete"]["num_roles"]) == (True, 2)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_fails_when_the_input_is_bad(models):
    code, _, err = finished("run", f"{models}:good", "--mesh", "dp=3", "--steps", 1, torchrun=2)
    assert code != 0
    assert "error:" in err
