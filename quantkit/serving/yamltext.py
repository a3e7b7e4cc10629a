"""Readable YAML: no anchors, multi-line text as a block, reasons on top."""

from collections.abc import Sequence
from typing import Any

from quantkit.engine import label
from quantkit.serving.plan import Plan


def dump(documents: Sequence[Any]) -> str:
    """Documents as YAML text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000))


def head(plan: Plan, *lines: str) -> str:
    """A comment on what a file is, and why the engine has its flags."""
    first = f"{plan.target.name} in {label(plan.engine)} for {plan.where}; written by quantkit."
    explained = [flag for flag in plan.flags if flag.name not in ("--host", "--port")]
    wide = max(len(flag.name) for flag in explained)
    flags = [f"  {flag.name:{wide}}  {flag.why}" for flag in explained]
    notes = [f"  note: {note}" for note in plan.notes]
    comments = [first, *lines, "", "Why the engine has these flags:", *flags, *notes]
    return "".join(f"# {line}".rstrip() + "\n" for line in comments)
