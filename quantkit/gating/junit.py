"""A verdict as JUnit XML, which every CI system displays."""

from xml.etree import ElementTree

from quantkit.gating import words
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check, Verdict

NAME = "quantkit gate"


def render(verdict: Verdict) -> str:
    """One suite per candidate, one case per check."""
    root = ElementTree.Element("testsuites", name=NAME)
    for candidate in verdict.candidates:
        checks = [check for check in verdict.checks if check.candidate == candidate]
        suite = ElementTree.SubElement(root, "testsuite", name=plain(candidate))
        for check in checks:
            _case(suite, check, verdict.cannot_tell)
    if verdict.unjudged or verdict.notes:
        suite = ElementTree.SubElement(root, "testsuite", name=f"{NAME}: left out")
        for name in verdict.unjudged:
            case = ElementTree.SubElement(suite, "testcase", classname=NAME, name=plain(name))
            ElementTree.SubElement(case, "skipped", message="no rule judges it")
        for note in verdict.notes:
            case = ElementTree.SubElement(suite, "testcase", classname=NAME, name=plain(note))
            ElementTree.SubElement(case, "skipped", message=plain(note))
    return _written(root)


def render_error(message: str) -> str:
    """A single case with an error: the gate could not judge."""
    root = ElementTree.Element("testsuites", name=NAME)
    suite = ElementTree.SubElement(root, "testsuite", name=NAME)
    case = ElementTree.SubElement(suite, "testcase", classname=NAME, name="could not judge")
    lines = [plain(line) for line in message.splitlines()]
    ElementTree.SubElement(case, "error", message=lines[0] if lines else "").text = "\n".join(lines)
    return _written(root)


def _case(suite: ElementTree.Element, check: Check, cannot_tell: str) -> None:
    name = f"{words.metric(check)}: {words.limit(check)}"
    case = ElementTree.SubElement(suite, "testcase", classname=plain(check.candidate), name=name)
    kind = {
        Answer.PASS: None,
        Answer.FAIL: "failure",
        Answer.CANNOT_TELL: {"fail": "failure", "warn": "skipped", "ask": "error"}[cannot_tell],
    }[check.answer]
    reason = f"{plain(check.candidate)}: {check.reason}"
    if kind is None:
        ElementTree.SubElement(case, "system-out").text = reason
        return
    message = reason if check.answer is Answer.FAIL else f"cannot tell: {reason}"
    ElementTree.SubElement(case, kind, message=message).text = message


def _written(root: ElementTree.Element) -> str:
    """With the counts that readers expect on every suite and in total."""
    for element in (*root.iter("testsuite"), root):
        element.set("tests", str(len(list(element.iter("testcase")))))
        for kind, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            element.set(plural, str(len(list(element.iter(kind)))))
        element.set("time", "0")
    for case in root.iter("testcase"):
        case.set("time", "0")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, "unicode")}\n'
