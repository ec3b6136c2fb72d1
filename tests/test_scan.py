"""What is seen in the HTML of built pages."""

import pytest

from kvq_lib.course import scan, site
from kvq_lib.course.scan_page import Page, says_nothing

A = "https://x.example/a"
CDN = "https://cdn.example"
LOADING = [
    f'<svg><image href="{A}"/></svg>',
    f'<svg><IMAGE xlink:href="{A}"></IMAGE></svg>',
    f'<svg><use href="{A}#part"/></svg>',
    f'<svg><rect fill="url({A}#f)"/></svg>',
    f'<svg><script href="{A}"/></svg>',
    f'<input type="image" src="{A}">',
    f'<table background="{A}">',
    f'<td background="{A}">',
    f'<body background="{A}">',
    f'<base href="{A}">',
    f'<meta http-equiv="Refresh" content="5; URL={A}">',
    f"<meta http-equiv=refresh content=\"0;url='{A}'\">",
    f"<iframe srcdoc=\"<img src='{A}'>\"></iframe>",
    f'<iframe srcdoc="&lt;script&gt;fetch(&quot;{A}&quot;)&lt;/script&gt;"></iframe>',
    f'<object data="{A}"></object>',
    f'<embed src="{A}">',
    f'<audio src="{A}"></audio>',
    f'<video poster="{A}"></video>',
    f'<video><source src="{A}"><track src="a.vtt"></video>',
    f'<video><track src="{A}"></video>',
    f'<img src=" \n{A}">',
    r'<img src="https:/\x.example/a.png">',
    r'<img src="\\x.example/a.png">',
    '<img src="ht\ntps://x.example/a.png">',
    '<img src="HTTPS:x.example/a.png">',
    f'<img srcset="data:image/png;base64,AA== 1x,{A} 2x">',
    f'<link rel="preload" as="image" imagesrcset="{A} 2x">',
    f"<style>@IMPORT URL({A});</style>",
    f"<style>@import'{A}';</style>",
    f'<style>p {{ background: image-set("a.png" 1x, "{A}" 2x) }}</style>',
    f"<p style=\"background: -webkit-image-set('{A}' 1x)\">",
    f'<script>fetch("{A}")</script>',
    f"<script type=module>import '{A}';</script>",
    f"<script type=module>import {{a}} from '{A}';</script>",
    f'<script>import("{A}")</script>',
    f'<script>image.src = "{A}"</script>',
    f'<script>sheet.href = "{A}"</script>',
    f'<script>image.setAttribute("src", "{A}")</script>',
    f'<script>box.innerHTML = "<img src=\\"{A}\\">"</script>',
    f'<script>box.style.background = "url({A})"</script>',
    f'<script>new Worker("{A}")</script>',
    '<script>new WebSocket("wss://x.example")</script>',
    f'<script>request.open("GET", "{A}")</script>',
    f'<script>importScripts("{A}")</script>',
    f"<script>/* a */ fetch(`{A}/${{name}}`) // b</script>",
    f'<script type="importmap">{{"imports": {{"x": "{A}"}}}}</script>',
    f"<button onclick=\"fetch('{A}')\">",
]
HARMLESS = [
    '<svg xmlns="http://www.w3.org/2000/svg"><use href="#part"/></svg>',
    f'<svg><a href="{A}">a link</a></svg>',
    '<meta http-equiv="refresh" content="0; url=book/index.html">',
    f'<meta property="og:image" content="{A}">',
    f"<style>a[href^='{A}'] {{ color: red }}</style>",
    f'<script>const words = "see {A}"; a.href = "{A}"; location.href = "{A}"</script>',
    f'<script>// fetch("{A}")\n/* import "{A}" */</script>',
    f'<script type="application/json">{{"src": "{A}"}}</script>',
    "<script>document.createElementNS('http://www.w3.org/2000/svg', 'svg')</script>",
    f'<pre>fetch("{A}")</pre>',
]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<link rel="preload" as="font" href="https://fonts.example/a.woff">', True),
        ('<img srcset="a.png 1x, https://img.example/b.png 2x">', True),
        ('<iframe src="http://video.example"></iframe>', True),
        ("<style>@import 'https://fonts.example/a.css';</style>", True),
        ('<p style="background: url(https://img.example/a.png)">', True),
        ('<a href="https://example.org">A link that a reader follows</a>', False),
        ('<link rel="canonical" href="https://example.org/book">', False),
        ('<img src="../_images/a.png" alt="//">', False),
        ('<img src="data:image/png;base64,//8=">', False),
        *((page, True) for page in LOADING),
        *((page, False) for page in HARMLESS),
        ("<style>/* url(https://example.org) */ p { color: red }</style>", False),
    ],
)
def test_files_from_other_hosts_are_recognized(tmp_path, page, found):
    (tmp_path / "page.html").write_text(page)
    assert bool(list(scan.external_files(tmp_path))) is found


def test_style_sheets_are_searched_too(tmp_path):
    (tmp_path / "a.css").write_text("p { src: url('https://fonts.example/a.woff') }")
    assert list(scan.external_files(tmp_path)) == [
        ("a.css", "https://fonts.example/a.woff")
    ]


def test_dead_links_are_told_from_living_ones(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.html").write_text(
        '<p id="p"></p><a name="n"></a><a href="#p">.</a><a href="#n">.</a>'
        '<a href="../two.html#q">.</a><a href="https://x.example/#y">.</a>'
        '<a href="mailto:x@example.org">.</a><a href="data.zip">.</a>'
        '<a href="#no">.</a><a href="../two.html#no">.</a><a href="no.html">.</a>'
    )
    (tmp_path / "a" / "data.zip").write_bytes(b"")
    (tmp_path / "two.html").write_text('<p id="q"></p><a href="/name/a/one.html#p">')
    dead = [("a/one.html", x) for x in ("#no", "../two.html#no", "no.html")]
    assert list(scan.dead_links(tmp_path, "/name/")) == dead
    found = list(scan.dead_links(tmp_path, "/other/"))
    assert ("two.html", "/name/a/one.html#p") in found


def test_scripts_are_searched_too(tmp_path):
    (tmp_path / "a.js").write_text(f'const a = await fetch("{A}");')
    (tmp_path / "mathjax").mkdir()
    (tmp_path / "mathjax" / "b.js").write_text(f'fetch("{CDN}/b.js");')
    assert list(scan.external_files(tmp_path)) == [("a.js", A)]


def test_folders_of_vendored_scripts_are_those_of_the_book():
    vendor = site.ROOT / "book" / "assets" / "vendor"
    assert {f"{p.name}/" for p in vendor.iterdir() if p.is_dir()} == {*scan.VENDORED}


def test_areas_and_drawn_links_can_be_dead(tmp_path):
    page = '<map><area href="no.html"></map><svg><a xlink:href="#no"></a></svg>'
    (tmp_path / "page.html").write_text(page)
    assert [link for _, link in scan.dead_links(tmp_path)] == ["no.html", "#no"]


def test_files_that_are_not_there_are_told(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a b.png").write_bytes(b"")
    gone = ["gone.png", "../gone.js", "gone.mp4", "/gone.css"]
    (tmp_path / "there" / "page.html").write_text(
        '<img src="a%20b.png?v=1"><img src="/name/there/a b.png"><img src="#">'
        '<img src="data:image/png;base64,AA=="><img src="gone.png">'
        '<script src="../gone.js"></script><source src="gone.mp4">'
        '<link rel="stylesheet" href="/gone.css"><a href="no.html">a link</a>'
    )
    assert [file for _, file in scan.missing_files(tmp_path, "/name/")] == gone


@pytest.mark.parametrize(
    "tag",
    [
        '<img src="a.png">',
        '<img src="a.png" alt>',
        '<img src="a.png" alt="">',
        '<img src="a.png" alt="  " role="presentation">',
        '<img src="a.png" alt="_images/a">',
        '<img src="a.png" alt="a curve.png">',
        '<img src="a.png" alt="Image">',
        '<img src="a.png" aria-hidden="true">',
        '<input type="image" src="a.png">',
        '<svg viewBox="0 0 1 1"><rect/></svg>',
        '<svg role="img" aria-label="chart"><rect/></svg>',
        "<svg><title> </title><rect/></svg>",
        "<svg><g><title>A bar</title><rect/></g></svg>",
        "<svg><rect/>",
    ],
)
def test_pictures_without_words_are_seen(tag):
    begin = tag[: tag.index(">") + 1]
    assert Page(f"<main><p>{tag}</p></main>").wordless == [begin]
    assert Page(f'<iframe srcdoc="{tag.replace(chr(34), chr(39))}">').wordless


@pytest.mark.parametrize(
    "tag",
    [
        '<img src="a.png" alt="Loss falls with every bit.">',
        '<img src="a.png" alt="" role="presentation">',
        '<img src="a.png" alt="" aria-hidden="true">',
        '<svg aria-label="Loss against bits"><rect/></svg>',
        '<svg aria-labelledby="x"><rect/></svg>',
        "<svg><title>Loss against bits</title><rect/></svg>",
        "<svg><title>Loss</title><svg><rect/></svg></svg>",
        '<svg aria-hidden="true"><rect/></svg>',
        '<button aria-hidden="true"><b>x</b><svg><rect/></svg></button>',
        '<div role="img" aria-label="Loss against bits"><svg><rect/></svg></div>',
        '<svg role="img" class="filled-by-a-script"></svg>',
        '<!-- <img src="a.png"> -->',
        "<script>let a = '<img>';</script>",
    ],
)
def test_pictures_with_words_and_ornaments_are_left_alone(tag):
    assert Page(f"<main>{tag}</main>").wordless == []


def test_words_that_only_say_picture_say_nothing():
    for words in (
        "",
        " ",
        "image",
        "An image.",
        "Figure 3",
        "plot",
        "the chart",
        "x.svg",
    ):
        assert says_nothing(words), words
    for words in ("A plot of loss", "Logo", "Figures of speech", "Keys and/or values"):
        assert not says_nothing(words), words
