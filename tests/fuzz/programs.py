"""Random training programs: a model, its batches and loss, and what `meshweave.compile` is asked to make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tests.fuzz.blocks import Sizes, any_block, repeated
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.passes import Decompose, Overlap, Prefetch, Recompute, Split

VOCABULARY, CLASSES = 11, 5


class Net(nn.Module):
    """Blocks one after the other, and heads: several outputs, a tied embedding, an auxiliary value half-way."""

    def __init__(self, chance: Random, on: Mapping[int, mw.Mesh], stages: int = 1, twins: int = 0) -> None:
        super().__init__()
        self.kind = chance.choice(["vector", "sequence", "tokens", "signal", "image", "image"])
        self.start: Sizes = {
            "vector": lambda: (chance.choice([4, 6, 7, 9]),),
            "sequence": lambda: (chance.choice([3, 4, 5, 6]), chance.choice([4, 6, 8])),
            "tokens": lambda: (chance.choice([3, 4, 5, 6]),),
            "signal": lambda: (chance.choice([2, 3, 4, 6]), chance.choice([5, 6, 8])),
            "image": lambda: (chance.choice([2, 3, 4, 6]), chance.choice([4, 5, 6]), chance.choice([4, 6])),
        }[self.kind]()
        kind, sizes = self.kind, self.start
        self.embed = self.positions = None
        if kind == "tokens":
            width = chance.choice([4, 6, 8])
            self.embed = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Parameter(0.1 * torch.randn(*sizes, width)) if chance.random() < 0.5 else None
            kind, sizes = "sequence", (*sizes, width)
        self.blocks, self.on = nn.ModuleList(), on
        count, twins_at = chance.choice([2, 3, 3, 4, 5]), chance.randrange(2)
        while len(self.blocks) < count or self._num_layers() < stages:
            if twins and len(self.blocks) == twins_at:
                self.blocks.extend(repeated(chance, kind, sizes, twins))
            found = any_block(chance, kind, sizes)
            kind, sizes = found.kind, found.sizes
            self.blocks.append(found.module)
        self.result = kind
        self.features_at = 1 if kind in ("image", "signal") else -1
        features = sizes[0] if self.features_at == 1 else sizes[-1]
        self.is_tied = self.embed is not None and kind == "sequence" and chance.random() < 0.6
        if self.is_tied:
            self.to_embedding = nn.Linear(features, self.embed.embedding_dim)
            self.head = nn.Linear(self.embed.embedding_dim, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
        else:
            self.head = nn.Linear(features, CLASSES, bias=chance.random() < 0.5)
        self.form = chance.choice(["tensor", "tensor", "tuple", "dict"])
        self.register_buffer("offset", torch.linspace(-0.5, 0.5, features))
        for parameter in self.parameters():
            if chance.random() < 0.06:
                parameter.requires_grad_(False)
        self.head.weight.requires_grad_(True)

    def _num_layers(self) -> int:
        return sum(any(True for _ in block.parameters()) for block in self.blocks)

    def forward(self, x: Tensor) -> Any:
        if self.embed is not None:
            x = self.embed(x) if self.positions is None else self.embed(x) + self.positions
        half = x
        for i, block in enumerate(self.blocks):
            if i in self.on:
                x = mw.on(x, self.on[i])
            x = block(x)
            half = x if i == 0 else half
        x = x.movedim(self.features_at, -1) + self.offset
        out = self.head(self.to_embedding(x)) if self.is_tied else self.head(x)
        if self.form == "tensor":
            return out
        extra = 0.1 * half.square().mean()
        return (out, extra) if self.form == "tuple" else {"out": out, "extra": extra}


@dataclass
class Settings:
    """What is asked of `meshweave.compile`, and of the judge as far as it means something on one device."""

    mesh: str
    plan: Any = None
    batch: int = 4
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    accumulate: int = 1
    passes: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """A program of a seed. `loss(model)` is the loss function that reads the parameters of that model or not."""

    seed: int
    model: nn.Module
    batches: list[Any]
    loss: Callable[[nn.Module], Callable[[Any, Any], Tensor]]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer | None]
    settings: Settings

    def __str__(self) -> str:
        s = self.settings
        options = ", ".join(f"{k}={v}" for k, v in s.options.items())
        head = f"mesh {s.mesh!r}, plan {s.plan}, batch {s.batch}, {s.optimizer}, accumulate {s.accumulate}, {s.dtype}"
        return f"{head}, {options}\n{self.model}"


MESHES = (
    *("dp=2", "dp=3", "dp=5", "fsdp=2", "fsdp=3", "fsdp=5", "tp=2", "tp=3", "tp=5", "pp=2", "pp=2", "pp=3"),
    *("dp=2,tp=2", "dp=3,tp=2", "fsdp=2,tp=2", "fsdp=2,tp=3", "dp=2,fsdp=2", "pp=2,dp=2", "pp=2,fsdp=2", "pp=2,fsdp=3"),
    *("pp=2,tp=2", "dp=1,tp=3", "fsdp=3,tp=1", "pp=1,fsdp=3", "", "dp=1", "dp=2,fsdp=2,tp=2", "pp=2,fsdp=2,tp=2"),
)


def any_program(seed: int) -> Program:
    """The program of a seed, always the same."""
    chance = Random(seed)
    torch.manual_seed(seed)
    mesh = mw.Mesh(chance.choice(MESHES))
    on = _operators(chance, mesh) if chance.random() < 0.1 else {}
    recompute = chance.choice(["full", "selective"]) if chance.random() < 0.35 else "none"
    stages = max(mesh.size("pp") if "pp" in mesh.axis_names else 1, len(on))
    model = Net(chance, on, stages, chance.choice([2, 3]) if recompute != "none" or chance.random() < 0.3 else 0)
    settings = _settings(chance, mesh, model, bool(on))
    if recompute != "none":
        settings.passes.append(Recompute(recompute))
    model = model.to(settings.dtype)
    batches = [_batch(chance, model, settings) for _ in range(chance.choice([2, 2, 3]))]
    return Program(seed, model, batches, _loss(chance, model), _optimizer(chance, settings), settings)


def _operators(chance: Random, mesh: mw.Mesh) -> dict[int, mw.Mesh]:
    """The model itself says where its blocks run: on slices of the first axis, one after the other."""
    if not mesh.axis_names or mesh.shape[0] == 1:
        return {}
    axis = mesh.axis_names[0]
    return {i: mesh.at(**{axis: i}) for i in range(mesh.shape[0])}


def _settings(chance: Random, mesh: mw.Mesh, model: Net, has_operators: bool) -> Settings:
    accumulate = chance.choice([1, 1, 1, 2, 3])
    batch = accumulate * chance.choice([1, 2, 3, 4, 5, 6])
    dtype = chance.choice([torch.float64, torch.float64, torch.float32])
    found = Settings(str(mesh), _plan(chance, mesh, model, has_operators), batch, dtype=dtype, accumulate=accumulate)
    found.optimizer = chance.choice(["sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "groups", "none"])
    options: dict[str, Any] = {}
    if chance.random() < 0.4:
        found.passes.append(Prefetch(chance.choice([1, 2])))
    if chance.random() < 0.2:
        found.passes += [Overlap()]
    if chance.random() < 0.4:
        found.passes.append(chance.choice([Decompose(), Decompose(when="always"), Decompose(when="always")]))
    if chance.random() < 0.35:
        found.passes.append(chance.choice([Split(), Split((2,), when="always"), Split((3,), when="always")]))
    if dtype == torch.float32 and chance.random() < 0.35:
        options["precision"] = torch.bfloat16
    if found.optimizer != "none" and chance.random() < 0.3:
        options["clip_grad_norm"] = chance.choice([0.05, 10.0])
    if chance.random() < 0.6:
        options["run"] = mw.RunOptions(keep_gradients=True)
    if chance.random() < 0.6 or any(map(_asks_costs, found.passes)):
        options["profile"] = chance.choice(["h100", "a100"])
    found.options = options
    return found


def _asks_costs(asked: Any) -> bool:
    return isinstance(asked, (Overlap, Decompose, Split)) and getattr(asked, "when", "gain") == "gain"


def _plan(chance: Random, mesh: mw.Mesh, model: Net, has_operators: bool) -> Any:
    """None (the usual), or the usual with what a user may add or say instead."""
    if chance.random() < 0.55 or not mesh.axis_names:
        return mw.Plan() if has_operators and len(mesh.axis_names) == 1 and chance.random() < 0.3 else None
    plan = mw.Plan()
    linears = [n for n, m in model.named_modules() if type(m) is nn.Linear and n.startswith("blocks")]
    for axis in mesh.axis_names:
        if axis == "tp" and linears and not any(e.kind == "layout" for e in plan.entries) and chance.random() < 0.7:
            styles = {n: chance.choice(["colwise", "rowwise", "replicate"]) for n in linears if chance.random() < 0.8}
            plan += mw.Plan.tp("tp", styles or {linears[0]: "colwise"})
        elif axis in ("dp", "fsdp") and chance.random() < 0.8:
            plan += {"dp": mw.Plan.dp, "fsdp": mw.Plan.fsdp}[axis](axis)
        elif plan == mw.Plan() and axis in ("dp", "fsdp", "tp") and (layouts := _layouts(chance, axis, model)):
            plan += mw.Plan(layouts)
        elif axis == "pp" and mesh.size(axis) > 1 and chance.random() < 0.5:
            count, size = len(model.blocks), mesh.size(axis)
            stages = sorted([*range(size), *(chance.randrange(size) for _ in range(count - size))])
            plan += mw.Plan.on({f"blocks.{i}": f"pp={stage}" for i, stage in enumerate(stages)})
        elif axis == "pp" and mesh.size(axis) > 1:
            plan += mw.Plan.stages(axis)
        else:
            plan += mw.Plan.replicate(axis)
    if "fsdp" in mesh.axis_names and chance.random() < 0.3:
        plan += mw.Plan.keep("head")
    if "tp" in mesh.axis_names and chance.random() < 0.2:
        plan += mw.Plan.sequence_parallel("tp")
    return plan


def _layouts(chance: Random, axis: str, model: Net) -> dict[str, str]:
    """Some parameters cut along a random dim."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() and chance.random() < 0.5:
            dim = chance.randrange(parameter.dim())
            found[name] = "[" + ", ".join(f"{{{axis}}}" if d == dim else "{}" for d in range(parameter.dim())) + "]"
    return found


def _batch(chance: Random, model: Net, settings: Settings) -> Any:
    with torch.no_grad():
        if model.kind == "tokens":
            x = torch.randint(0, VOCABULARY, (settings.batch, *model.start))
        else:
            x = torch.randn(settings.batch, *model.start, dtype=settings.dtype)
        out = model.eval()(x)
        model.train()
        out = out if model.form == "tensor" else (out[0] if model.form == "tuple" else out["out"])
        y = torch.randint(0, out.shape[-1], out.shape[:-1])
    return {"x": x, "y": y} if model.form != "tuple" else (x, y)


def _loss(chance: Random, model: Net) -> Callable[[nn.Module], Callable[[Any, Any], Tensor]]:
    kind = chance.choice(["cross entropy", "cross entropy", "square", "smooth"])
    decay = chance.choice([0.0, 0.0, 0.0, 0.02])
    form, names = model.form, [n for n, p in model.named_parameters() if p.requires_grad]
    decayed = chance.sample(names, max(1, len(names) // 2))

    def build(model: nn.Module) -> Callable[[Any, Any], Tensor]:
        def loss(out: Any, batch: Any) -> Tensor:
            out, extra = (out, 0.0) if form == "tensor" else (out if form == "tuple" else (out["out"], out["extra"]))
            y = batch[1] if form == "tuple" else batch["y"]
            if kind == "cross entropy":
                value = F.cross_entropy(out.flatten(0, -2), y.flatten())
            elif kind == "square":
                value = (out - F.one_hot(y, out.shape[-1]).to(out.dtype)).square().mean()
            else:
                value = F.smooth_l1_loss(out, F.one_hot(y, out.shape[-1]).to(out.dtype))
            if decay:
                value = value + decay * sum(dict(model.named_parameters())[n].square().sum() for n in decayed)
            return value + extra

        return loss

    return build


def _optimizer(chance: Random, settings: Settings) -> Callable[[nn.Module], torch.optim.Optimizer | None]:
    decay, maximize = chance.choice([0.0, 0.1]), chance.random() < 0.05
    torch_optim = torch.optim

    def build(model: nn.Module) -> torch.optim.Optimizer | None:
        params = [p for p in model.parameters() if p.requires_grad]
        adam = {"lr": 0.02, "eps": 1e-2, "weight_decay": decay, "maximize": maximize}
        sgd = {"lr": 0.1, "weight_decay": decay, "maximize": maximize}
        match settings.optimizer:
            case "sgd":
                return torch_optim.SGD(params, **sgd)
            case "momentum":
                return torch_optim.SGD(params, **sgd, momentum=0.9, dampening=0.1)
            case "nesterov":
                return torch_optim.SGD(params, **sgd, momentum=0.8, nesterov=True)
            case "adam":
                return torch_optim.Adam(params, **adam)
            case "adamw":
                return torch_optim.AdamW(params, **adam, betas=(0.7, 0.9))
            case "amsgrad":
                return torch_optim.AdamW(params, **adam, amsgrad=True)
            case "groups":
                half = len(params) // 2
                groups = [{"params": params[half:], "lr": 0.05, "weight_decay": 0.0}, {"params": params[:half]}]
                return torch_optim.SGD([g for g in groups if g["params"]], **sgd)
        return None

    return build
