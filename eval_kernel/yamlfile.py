"""YAML files without surprises: keys that stand twice are refused, dates stay text. Knows no schema."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from eval_kernel.errors import MAX_REASON, FedevalError


def read_yaml(path: Path, what: str, error: type[FedevalError]) -> Any:
    """Return the content of a YAML file; ``what`` names the file's purpose in messages.

    Raises ``error`` when the file cannot be read, is not UTF-8, or is not one YAML document; the text names the line.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as e:
        raise error(f"{path}: cannot read the {what} ({e.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as e:
        raise error(f"{path}: the {what} is not UTF-8 at byte {e.start}; save it as UTF-8") from None
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise error(f"{path}: {line}not valid YAML ({_cut(getattr(e, 'problem', None) or e)})") from None
    except ValueError as e:
        # PyYAML's constructors let some through, such as the number 0o9.
        raise error(f"{path}: not valid YAML ({_cut(e)})") from None
    except RecursionError:
        raise error(f"{path}: the {what} is nested too deeply") from None


def _cut(problem: object) -> str:
    """A reason of PyYAML's, which may repeat as much of the file as it likes."""
    text = " ".join(str(problem).split())
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


class _Loader(yaml.SafeLoader):
    """The safe loader, stricter about keys and without implicit dates (which JSON does not have)."""

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML's own way to configure a loader class
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping; raises ``ConstructorError`` when a key stands in it twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value!r} stands here for the second time"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
