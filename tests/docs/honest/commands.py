"""Commands, their options, and the targets of make."""

import re
from collections.abc import Iterator, Sequence

from tests.docs.known import commands, targets
from tests.docs.pages import Pages, code

SHELL = ("inline", "", "sh", "bash", "console", "text", "ini")  # blocks without a language show commands, too


def wrong_commands(texts: Pages) -> list[str]:
    """`onward NAME` and its options, and options that stand alone."""
    shell = [each for each in code(texts) if each.language in SHELL]
    problems = [each.problem(what) for each in shell for what in _judge_command(_command_line(each.text), each.text)]
    options = frozenset().union(*commands().values())
    alone = [(each, re.match(r"--[a-z][a-z-]*", each.text)) for each in shell if each.language == "inline"]
    return problems + [each.problem(f"no command has {o[0]}") for each, o in alone if o and o[0] not in options]


def _command_line(text: str) -> list[str]:
    """The words behind `onward`, up to a comment or to the explanation behind two spaces."""
    found = re.search(r"(?<![\w.:'\"-])onward ([a-z-].*)", text)
    if found is None or re.search(r"\b(from|import|install|named|cd) $", text[: found.start()]):
        return []
    return re.split(r" {2,}| #|[;|>]", found[1])[0].split()


def _judge_command(words: Sequence[str], text: str) -> Iterator[str]:
    if not words:
        return
    known = commands()
    name = words[0] if not words[0].startswith("-") else ""
    is_group = any(each.startswith(f"{name} ") for each in known)
    if is_group and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
        name = f"{name} {words[1]}"
    if name not in known:
        yield f"there is no command `onward {name}`"
    else:
        wrong = [
            option for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text) if option not in known[name] | known[""]
        ]
        yield from (f"`onward {name}` has no option {option}" for option in wrong)


def missing_commands(texts: Pages) -> list[str]:
    shown = [" ".join(_command_line(each.text)[:2]) for each in code(texts)]
    wanted = [name for name in commands() if name]
    return [
        f"no page shows `onward {name}`"
        for name in wanted
        if not any(f"{each} ".startswith(f"{name} ") for each in shown)
    ]


def wrong_targets(texts: Pages) -> list[str]:
    found = [(each, re.match(r"(?:\$ )?make ([a-z-]+)", each.text)) for each in code(texts) if each.language in SHELL]
    return [each.problem(f"no target {make[1]!r}") for each, make in found if make and make[1] not in targets()]
