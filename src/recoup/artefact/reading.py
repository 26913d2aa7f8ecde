"""Loading a result: everything is checked before it is used, and nothing in the folder can run, import or write.

First the manifest and the hashes, then each file under its schema, then the model, and at last what it computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recoup.artefact.files import AGAIN, GRAPH, PLAN, SAMPLES, WEIGHTS, not_a, read_checked, size_of
from recoup.artefact.graph_json import GRAPH_SCHEMA, graph_from_json, require_unwritten
from recoup.artefact.manifest import Manifest, check_files, check_tensors, read_manifest
from recoup.artefact.plan_json import PLAN_SCHEMA, for_model, plan_from_json
from recoup.artefact.samples import Samples, check_samples, why_too_large
from recoup.artefact.schema import MisfitError
from recoup.artefact.tree import class_name
from recoup.errors import ArtefactError, RecoupError
from recoup.graph.standalone import standalone
from recoup.inputs.batches import Inputs
from recoup.plan import GraphPlan, Plan
from recoup.surgery.apply import apply

Made = TypeVar("Made")
# Far more than what is stored, which is a few MB.
_SAMPLES_BYTES = 128 << 20


def load(
    folder: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    check: bool = True,
    operators: Collection[str] = (),
    classes: Iterable[type] = (),
) -> nn.Module:
    """The smaller model as it was saved, in the mode it was saved in.

    Args:
        folder: what `Result.save` wrote.
        model: the original or a function that builds it; a standalone result needs none.
        check: refuse files that are not those that were saved, another class than the original's, and a model that
            makes something else of the samples stored with it. Without it, only the form of the files is checked.
        operators: libraries besides torch's whose operators a standalone result may call, such as `("torchvision",)`.
        classes: classes that the model takes or returns, such as Hugging Face's outputs; others come back as dicts.

    Raises:
        ArtefactError: a file is missing or damaged, or the model is not the one that was pruned.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if check:
        check_files(folder, manifest)
    plan, added = _read_plan(folder)
    tensors = _read_tensors(folder / WEIGHTS)
    if check:
        check_tensors(tensors, manifest, folder / WEIGHTS)
    samples = _read_samples(folder, manifest) if check else None
    if is_standalone(folder):
        loaded = _standalone(folder, manifest, tensors, samples, operators, tuple(classes))
    else:
        original = _original(folder, model)
        if check:
            _check_class(folder, manifest, original)
        loaded = _of_class(folder, original, for_model(plan, added, original), tensors)
        _restore_training(loaded, manifest)
    _restore_modes(loaded, manifest, folder)
    if samples is not None:
        check_samples(loaded, samples, folder)
    return loaded


def is_standalone(folder: str | Path) -> bool:
    """Whether a saved result is a graph of its own, which needs no model to be loaded."""
    return os.path.lexists(Path(folder) / GRAPH)


def read_source(folder: str | Path) -> str | None:
    """Where the original model came from, if the one who saved it said so. It is a claim: do not import it unasked."""
    source: str | None = read_checked(Path(folder) / PLAN, PLAN_SCHEMA, "a plan")["source"]
    return source


def read_plan(folder: Path) -> tuple[Plan, tuple[str, ...]]:
    """The plan without weights, and the names of biases that pruning added."""
    plan, added = _read_plan(folder)
    return plan, tuple(added)


def sample_shape(folder: str | Path) -> tuple[int, ...] | None:
    """Shape of one stored input, without the batch, where the model takes a single tensor."""
    inputs = stored_inputs(folder)
    tensors = inputs.tensors() if inputs is not None else []
    return tuple(tensors[0].shape[1:]) if len(tensors) == 1 else None


def stored_inputs(folder: str | Path) -> Inputs | None:
    """The inputs that a loaded model is checked on; None where none were stored."""
    folder = Path(folder)
    samples = _read_samples(folder, read_manifest(folder))
    return None if samples is None else samples.inputs


def _read_plan(folder: Path) -> tuple[Plan, dict[str, list[int]]]:
    data = read_checked(folder / PLAN, PLAN_SCHEMA, "a plan")
    try:
        return plan_from_json(data), data["added"]
    except MisfitError as error:
        raise not_a(folder / PLAN, "a plan", error) from error


def _read_tensors(path: Path, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a file, in memory of their own: what is mapped would change or go with the file."""
    size, memory = size_of(path), _memory()
    if size > (memory if most is None else most):
        raise ArtefactError(f"{path} has {size:,} bytes, more than can be loaded here. {AGAIN}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # it is no dict
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ArtefactError(f"{path} is damaged ({str(error)[:200]}). {AGAIN}") from error


def _memory() -> int:
    """Bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 40


def _read_samples(folder: Path, manifest: Manifest) -> Samples | None:
    if manifest.unchecked is not None:
        return None
    samples = Samples(_read_tensors(folder / SAMPLES, _SAMPLES_BYTES), manifest.call, manifest.tolerance)
    names = {f"{kind}.{place}" for kind in ("input", "output") for place in range(len(samples.tensors))}
    if not samples.outputs or not samples.tensors.keys() <= names:
        raise ArtefactError(f"{folder / SAMPLES} holds something else than inputs and outputs. {AGAIN}")
    return samples


def _standalone(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    samples: Samples | None,
    operators: Collection[str],
    classes: tuple[type, ...],
) -> nn.Module:
    """The graph with its tensors: what was a parameter is one again, the rest are buffers."""
    data = read_checked(folder / GRAPH, GRAPH_SCHEMA, "a graph")
    trains = {name: entry.trains for name, entry in manifest.tensors.items() if entry.trains is not None}
    try:
        plan = graph_from_json(data, (operators,) if isinstance(operators, str) else operators, classes)
        require_unwritten(plan.graph, trains.keys())
        _require_tensors(plan, tensors.keys())
    except MisfitError as error:
        raise not_a(folder / GRAPH, "a graph", error) from error
    held = {name: _held(value, trains.get(name)) for name, value in tensors.items()}
    if samples is not None and (problem := why_too_large(plan, held, samples)):
        raise ArtefactError(f"{folder / GRAPH} cannot be checked on the samples stored with it: {problem}. {AGAIN}")
    return _built(folder, lambda: standalone(plan, held))


def _held(value: Tensor, trains: bool | None) -> Tensor:
    can_train = value.is_floating_point() or value.is_complex()
    return value if trains is None else nn.Parameter(value, requires_grad=trains and can_train)


def _require_tensors(plan: GraphPlan, held: Collection[str]) -> None:
    for node in plan.graph.nodes:
        if node.op == "get_attr" and str(node.target) not in held:
            raise MisfitError(f"the node {node.name}", f"about one of the tensors in {WEIGHTS}", str(node.target))


def _original(folder: Path, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    if model is None:
        raise ArtefactError(f"{folder} holds a result of the model's own class. Pass the original model to `load`.")
    original = model if isinstance(model, nn.Module) else model()
    if not isinstance(original, nn.Module):
        raise ArtefactError(
            f"what was passed to `load` gave a {type(original).__name__}. Pass the original model, or a function that "
            "builds it."
        )
    return original


def _check_class(folder: Path, manifest: Manifest, original: nn.Module) -> None:
    """Same name in the same module; what ran as a script, or from a file by its path, has no module to compare."""
    (saved_in, saved), (module, name) = (
        text.split(":", 1) for text in (f"{manifest.cls}:", class_name(type(original)))
    )
    is_loose = any(where == "__main__" or where.startswith("recoup_file_") for where in (saved_in, module))
    if saved.removesuffix(":") != name or (saved_in != module and not is_loose):
        raise ArtefactError(
            f"{folder} was made from the class {manifest.cls}, and this model is {class_name(type(original))}. Build "
            "the original; if its class has only been renamed or moved, pass check=False."
        )


def _of_class(folder: Path, original: nn.Module, plan: Plan, tensors: dict[str, Tensor]) -> nn.Module:
    smaller = _built(folder, lambda: apply(original, plan))
    state = {name: value for name, value in smaller.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    firsts: dict[int, str] = {}
    for name, value in state.items():
        firsts.setdefault(id(value), name)
    expected = {name: tuple(state[name].shape) for name in firsts.values()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ArtefactError(
            f"{folder / WEIGHTS} does not fit the model: {', '.join(wrong[:5])} differ. Use the model class and the "
            "folder that belong together."
        )
    for name, value in tensors.items():
        state[name].data = state[name].data.to(value.dtype)  # as it was saved, whatever the original is in
    _built(folder, lambda: smaller.load_state_dict(tensors, strict=False))
    return smaller


def _built(folder: Path, build: Callable[[], Made]) -> Made:
    try:
        return build()
    except RecoupError:
        raise
    except Exception as error:  # classes of the caller's own may raise anything when they are cut or filled
        raise ArtefactError(
            f"{folder} cannot be put together ({type(error).__name__}: {str(error)[:200]}). Build the original exactly "
            "as it was before pruning, and use the versions the result was saved with."
        ) from error


def _restore_training(smaller: nn.Module, manifest: Manifest) -> None:
    """Which parameters train."""
    for name, parameter in smaller.named_parameters():
        entry = manifest.tensors.get(name)
        if entry is not None and entry.trains is not None and (parameter.is_floating_point() or not entry.trains):
            parameter.requires_grad_(entry.trains)


def _restore_modes(model: nn.Module, manifest: Manifest, folder: Path) -> None:
    modules = dict(model.named_modules())
    unknown = sorted(manifest.training.keys() - modules.keys())
    if unknown or "" not in manifest.training:
        raise ArtefactError(
            f"{folder} names modules that the model does not have: {', '.join(unknown[:3])}. Build the original "
            "exactly as it was before pruning."
        )
    for name, module in modules.items():
        module.training = manifest.training.get(name, manifest.training[""])
