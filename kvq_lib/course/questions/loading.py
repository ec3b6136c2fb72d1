"""YAML as the bank wants it: strict, small, and with the line of every part."""

from dataclasses import dataclass

import yaml

LARGEST = 1_000_000  # bytes of a file


class Unreadable(Exception):
    """A file is no list of entries; the message says why, and where, if known."""


@dataclass(frozen=True)
class Entry:
    """What YAML made of one item of a file's list, and where its parts stand.

    Attributes:
        value: a mapping, if all is well.
        line: of the file, from 1.
        lines: of a key, and of "key 2" for the second item of a key's list.
    """

    value: object
    line: int
    lines: dict[str, int]


class _Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would take the last, and aliases,
    with which a small file can stand for a huge one."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "an alias is not allowed here", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if not isinstance(key, str) or keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is no text, or stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def entries(content: bytes) -> list[Entry]:
    """The entries of a file.

    Raises:
        Unreadable: it is not in UTF-8, no YAML, no list, too large or too deep.
    """
    if len(content) > LARGEST:
        raise Unreadable(f"a file has at most {LARGEST:,} bytes, not {len(content):,}")
    try:
        loader = _Strict(content.decode("utf-8"))
        try:
            root = loader.get_single_node()
            value = loader.construct_document(root) if root else None
        finally:
            loader.dispose()
    except UnicodeDecodeError as error:
        raise Unreadable(f"not in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise Unreadable(" ".join(str(error).split())) from None
    except RecursionError:
        raise Unreadable("its parts stand too deep in each other") from None
    except (ValueError, OverflowError) as error:  # a date that is none, a giant
        raise Unreadable(f"a date or a number that is none: {error}") from None
    if not isinstance(value, list) or not value:
        raise Unreadable("a file is a list of questions")
    return [
        Entry(item, node.start_mark.line + 1, _lines(node))
        for item, node in zip(value, root.value, strict=True)
    ]


def _lines(node: yaml.Node) -> dict[str, int]:
    found = {}
    if isinstance(node, yaml.MappingNode):
        for key, held in node.value:
            found[key.value] = key.start_mark.line + 1
            if isinstance(held, yaml.SequenceNode):
                for i, item in enumerate(held.value, start=1):
                    found[f"{key.value} {i}"] = item.start_mark.line + 1
    return found
