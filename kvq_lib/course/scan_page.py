"""What one page loads, where its links lead, and which pictures say nothing."""

import re
from html.parser import HTMLParser

# Attributes through which a page loads a file; a link that a reader follows is none.
# HTMLParser writes all names in small letters.
LOADING_ATTRIBUTES = {
    "audio": ("src",),
    "base": ("href",),
    "embed": ("src",),
    "feimage": ("href", "xlink:href"),
    "frame": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href", "imagesrcset"),
    "object": ("data",),
    "script": ("src", "href", "xlink:href"),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
LINKS_NOT_LOADED = {"author", "canonical", "help", "license", "next", "prev", "search"}
# Elements without an end tag.
VOID = set("area base br col embed hr img input link meta source track wbr".split())

# Browsers read backslashes as slashes, and any number of them after a scheme.
BEGINS_OUTSIDE = r"(?i:(?:https?|wss?|ftp):[\\/]*|[\\/]{2})"
OUTSIDE = rf"{BEGINS_OUTSIDE}[^\s\"'`<>)\\/][^\s\"'`<>)]*"
IN_SRCSET = re.compile(rf"(?:^|[\s,])({BEGINS_OUTSIDE}[^\s,]+)")
INLINED = re.compile(r"data:\S*", re.I)
REFRESH = re.compile(r"\s*[\d.]*\s*[;,\s]\s*(?:url\s*=)?\s*[\"']?([^\"']+)", re.I)
OTHER_SCHEME = re.compile(r"[a-z][\w+.-]*:|#", re.I)  # data:, or a place of the page
CONTROL = "".join(map(chr, range(33)))  # browsers pass over them around an address

# Attributes of SVG that take url(...), as a style does.
PAINT = ("clip-path", "cursor", "fill", "filter", "mask", "stroke", "style")
IN_CSS = re.compile(
    rf"(?:\b(?:url|src)\(|@import\s|@import(?=[\"']))\s*[\"']?({OUTSIDE})", re.I
)
IMAGE_SET = re.compile(r"image-set\(((?:[^()]|\([^()]*\))*)\)", re.I)
QUOTED = re.compile(rf"[\"']\s*({OUTSIDE})", re.I)
COMMENT = re.compile(r"/\*.*?\*/", re.S)

# What a script asks for at an address that it has in words: a call, an import, an
# attribute that loads, or the same in markup that it writes.
IN_SCRIPT = re.compile(
    r"""(?:
      \b(?:fetch|import|importScripts|(?:Shared)?Worker|EventSource|WebSocket|Request
         |Audio|FontFace|sendBeacon|getScript|getJSON|ajax|addModule|register
         |get|post|json|csv)
         \s*\(\s* (?:["'`][\w\s-]+["'`]\s*,\s*)?
      | \bimport\s* | \bfrom\s*
      | \.open\s*\(\s* ["'`]\w+["'`]\s*,\s*
      | \b(?:src|srcset|poster|imageSrcset) \s*=\s* \\?
      | (?<!\ba)(?<!location)\.href \s*=\s*
      | setAttribute\s*\(\s* ["'`](?:src|srcset|poster|xlink:href)["'`]\s*,\s*
      )["'`]\s*"""
    + f"({OUTSIDE})",
    re.X,
)
SCRIPT_COMMENT = re.compile(r"^\s*//[^\n]*$|(?:^|(?<=[\s;,({]))/\*.*?\*/", re.S | re.M)
# jupyterquiz would load another MathJax where the page's cannot typeset: ours can.
NEVER_LOADED = {"https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-svg.js"}
CODE = re.compile(r"^$|module|(?:java|ecma)script", re.I)

# What a picture gets from its path if nobody has given it words, and words that say
# only that it is one.
PATH = re.compile(r"\.(png|svg|jpe?g|gif|webp|avif|bmp)$|^\S*/\S*$", re.I)
KINDS = "chart diagram fig figure graph graphic illustration image img photo photograph"
KINDS += " pic picture plot screenshot"
GENERIC = re.compile(
    rf"(?:(?:an?|the|this)\s+)?(?:{'|'.join(KINDS.split())})\s*[\d.:!-]*", re.I
)


def says_nothing(words: str) -> bool:
    """Whether an alternative text tells nothing of what a picture shows."""
    words = words.strip()
    return not words or bool(PATH.search(words) or GENERIC.fullmatch(words))


def outside_in_css(rules: str) -> list[str]:
    """The addresses on other hosts from which CSS would load something."""
    rules = COMMENT.sub("", rules)
    found = IN_CSS.findall(rules)
    for several in IMAGE_SET.findall(rules):
        found += QUOTED.findall(several)
    return [*dict.fromkeys(found)]


def outside_in_script(code: str) -> list[str]:
    """The addresses on other hosts, in words, from which a script would load."""
    code = SCRIPT_COMMENT.sub("", code)
    found = IN_SCRIPT.findall(code) + outside_in_css(code)
    return [a for a in dict.fromkeys(found) if a not in NEVER_LOADED]


def _hidden(values: dict[str, str]) -> bool:
    """Whether an element is marked as an ornament."""
    return (
        values.get("role", "").strip().lower() in ("presentation", "none")
        or values.get("aria-hidden", "").strip().lower() == "true"
    )


def _named(values: dict[str, str]) -> bool:
    """Whether ARIA gives an element words."""
    label = values.get("aria-label", "")
    return bool(values.get("aria-labelledby", "").strip()) or not says_nothing(label)


class Page(HTMLParser):
    """One page, or a piece of one.

    Attributes:
        external: addresses on other hosts from which it would load something.
        loaded: all other addresses from which it loads.
        links: where its links lead, as written.
        ids: the places in it to which links can lead.
        wordless: tags, as written, of pictures that say nothing to who cannot see them.
    """

    def __init__(self, text: str):
        super().__init__()
        self.external: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.wordless: list[str] = []
        self._text = ""  # of the style, script or title that is open
        self._open: list[tuple[str, dict[str, str]]] = []
        self._drawing = ""  # tag of the SVG that is open and has no words
        self._drawn = False  # whether it has anything: a script may fill it later
        self.feed(text)
        self.close()
        while self._open:  # what the piece leaves open
            self.handle_endtag(self._open[-1][0])

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values.get("id"), values.get("name") if tag == "a" else None}
        if tag in ("a", "area"):
            links = (values.get(name, "") for name in ("href", "xlink:href"))
            self.links += filter(None, links)
        self._read_loads(tag, values)
        self._read_picture(tag, values)
        if tag not in VOID:
            self._open.append((tag, values))
            self._text = ""

    def handle_startendtag(self, tag, attrs):
        """Inside SVG `<x/>` is an element without content; in HTML it is `<x>`."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID and (self._inside("svg") or self._inside("math")):
            self.handle_endtag(tag)

    def handle_data(self, data):
        self._text += data

    def handle_endtag(self, tag):
        if self._inside(tag):
            name = ""
            while name != tag:  # what was left open within ends with it
                name, values = self._open.pop()
                self._end(name, values)

    def _end(self, tag: str, values: dict[str, str]) -> None:
        """Read what an element had in it."""
        kind = values.get("type", "").strip().lower()
        if tag == "style":
            self.external += outside_in_css(self._text)
        elif tag == "script" and CODE.search(kind):
            self.external += outside_in_script(self._text)
        elif tag == "script" and kind == "importmap":
            self.external += QUOTED.findall(self._text)
        elif tag == "title" and self._open and self._open[-1][0] == "svg":
            self._drawing = self._drawing if says_nothing(self._text) else ""
        elif tag == "svg" and not self._inside("svg"):
            if self._drawing and self._drawn:
                self.wordless.append(self._drawing)
            self._drawing = ""
        self._text = ""

    def _inside(self, tag: str) -> bool:
        return any(name == tag for name, _ in self._open)

    def _read_loads(self, tag: str, values: dict[str, str]) -> None:
        """Note what a tag loads."""
        for name in PAINT:
            self.external += outside_in_css(values.get(name, ""))
        for name, code in values.items():
            if name.startswith("on"):
                self.external += outside_in_script(code)
        if set(values.get("rel", "").lower().split()) & LINKS_NOT_LOADED:
            return
        if "srcdoc" in values:
            inner = Page(values["srcdoc"])
            self.external += inner.external
            self.loaded += inner.loaded
            self.wordless += inner.wordless
        addresses = [values.get("background", "")]
        for name in LOADING_ATTRIBUTES.get(tag, ()):
            value = values.get(name, "")
            if name.endswith("srcset"):
                self.external += IN_SRCSET.findall(INLINED.sub("", value))
            else:
                addresses.append(value)
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh":
            addresses += REFRESH.findall(values.get("content", ""))
        for address in (given.strip(CONTROL) for given in addresses):
            plain = re.sub(r"[\t\r\n]", "", address)
            if re.match(BEGINS_OUTSIDE, plain):
                self.external.append(address)
            elif plain and not OTHER_SCHEME.match(plain):
                self.loaded.append(address)

    def _read_picture(self, tag: str, values: dict[str, str]) -> None:
        """Note a picture without words; of a drawing they may come as its title."""
        button = tag == "input" and values.get("type", "").lower() == "image"
        if (tag == "img" or button) and says_nothing(values.get("alt", "")):
            # Empty words mean an ornament; a figure of a book is none by accident.
            if values.get("alt") != "" or not _hidden(values):
                self.wordless.append(self.get_starttag_text())
        elif self._inside("svg"):
            self._drawn |= tag not in ("title", "desc")
        elif tag == "svg":
            self._drawn = False
            around = [*(above for _, above in self._open), values]
            told = _named(values) or any(
                above.get("role") == "img" and _named(above) for above in around
            )
            if not told and not any(map(_hidden, around)):
                self._drawing = self.get_starttag_text()
