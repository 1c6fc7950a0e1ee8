"""Commands, their options, and the targets of make."""

import re
from collections.abc import Iterator, Sequence

from tests.docs.known import commands, targets
from tests.docs.pages import Code, Pages, code

SHELL = ("inline", "", "sh", "bash", "console", "text", "ini", "yaml", "dockerfile")  # blocks without a language, too
_LIST = re.compile(r"\[ *[\"']?[\w./-]*\bonward[\"']?(?: *, *[^],]+)* *\]")  # ["onward", "run"] or [onward, run]


def wrong_commands(texts: Pages) -> list[str]:
    """`onward NAME` and its options, and options that stand alone."""
    problems = [each.problem(what) for each in _simple(texts) for what in _judge_command(_words(each.text))]
    options = frozenset().union(*commands().values())
    alone = [(each, re.match(r"--[a-z][a-z-]*", each.text)) for each in code(texts) if each.language == "inline"]
    return problems + [each.problem(f"no command has {o[0]}") for each, o in alone if o and o[0] not in options]


def _simple(texts: Pages) -> Iterator[Code]:
    """Every simple command: each part of `cd shop && onward run`, without comments, and without the explanation behind
    two spaces. The list of a container's command is written as a line."""
    for each in code(texts):
        if each.language in SHELL:
            line = _LIST.sub(lambda found: " ".join(re.findall(r"[^][\s\"',]+", found[0])), each.text)
            shown = re.split(r" {2,}| #", line.strip())[0]
            yield from (each._replace(text=part.strip()) for part in re.split(r"&&|[;|>]", shown))


def _words(command: str) -> list[str]:
    """The words behind `onward`."""
    found = re.search(r"(?<![\w.:'\"-])onward ([a-z-].*)", command)
    if found is None or re.search(r"\b(from|import|install|named|cd) $", command[: found.start()]):
        return []
    return found[1].split()


def _judge_command(words: Sequence[str]) -> Iterator[str]:
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
        options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words))
        wrong = [option for option in options if option not in known[name] | known[""]]
        yield from (f"`onward {name}` has no option {option}" for option in wrong)


def missing_commands(texts: Pages) -> list[str]:
    shown = [" ".join(_words(each.text)[:2]) for each in _simple(texts)]
    wanted = [name for name in commands() if name]
    return [
        f"no page shows `onward {name}`"
        for name in wanted
        if not any(f"{each} ".startswith(f"{name} ") for each in shown)
    ]


def wrong_targets(texts: Pages) -> list[str]:
    found = [(each, re.match(r"(?:\$ )?make ([a-z-]+)", each.text)) for each in _simple(texts)]
    return [each.problem(f"no target {make[1]!r}") for each, make in found if make and make[1] not in targets()]
