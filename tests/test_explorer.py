"""The explorer of chapter 1: its numbers are the library's, and anyone can use it."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from helpers import real_model

import kvq_lib as kvq
from kvq_lib.course import explorer, live, scan, site
from kvq_lib.course.heads import moved, pattern, read_heads, sealed
from kvq_lib.errors import InvalidArgument, UnsupportedScheme

LIMIT = 300_000  # bytes of output
WIDTHS = (1280, 375)
THEMES = ("light", "dark")
#: Made up: the explorer only draws them.
QUALITY = {
    name: {"bits": 16 - 2 * i, "kl": 10.0 ** (i - 6), "delta": 0.1 * i - 0.2}
    for i, name in enumerate(explorer.LABELS)
}


@pytest.fixture(scope="module")
def data():
    return explorer.explorer_data(*real_model(), QUALITY)


@pytest.fixture(scope="module")
def heads():
    model, tokenizer = real_model()
    return read_heads(model, tokenizer(explorer.TEXT).input_ids, explorer.HEADS)


@pytest.fixture
def show(browser, data, tmp_path):
    """A function that opens a cell's output; whatever goes wrong fails the test."""
    troubles, contexts = [], []

    def open_output(width=WIDTHS[0], theme="light", shown=(data,)):
        body = "".join(explorer.explorer(d).html for d in shown)
        file = tmp_path / "output.html"
        file.write_text(
            f'<!doctype html><html lang="en" data-theme="{theme}"><head>'
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>An output</title></head><body>{body}</body></html>",
            encoding="utf-8",
        )
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        context.set_default_timeout(300_000)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"script error: {error}"))
        page.on(
            "console",
            lambda m: m.type == "error" and troubles.append(f"console: {m.text}"),
        )
        page.on(
            "request",
            lambda r: r.url != file.as_uri() and troubles.append(f"request: {r.url}"),
        )
        page.goto(file.as_uri())
        return page

    yield open_output
    for context in contexts:
        context.close()
    assert not troubles


def shape_of(model):
    return kvq.KVShape(model["layers"], model["kv_heads"], model["head_dim"])


# -- data ----------------------------------------------------------------------------


def test_the_output_is_small_and_loads_nothing(data, tmp_path):
    html = explorer.explorer(data)._repr_html_()
    assert len(html.encode()) <= LIMIT
    assert set(re.findall(r"https?://[^\"'\s)]+", html)) == {
        "http://www.w3.org/2000/svg"  # the name of a language, not an address
    }
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<link|src=", html)
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    assert list(scan.external_files(tmp_path)) == []


def test_the_text_fills_whole_pages(data):
    assert len(data["tokens"]) % data["page_size"] == 0
    assert "".join(data["tokens"]) == explorer.TEXT


def test_models_are_those_of_the_published_configs():
    folder = Path(__file__).parent / "configs"
    for name in ("Llama-2-7B", "Llama-3.1-8B", "Qwen2.5-7B"):
        published = json.loads((folder / f"{name.lower()}.json").read_text())
        for field, value in explorer.MODELS[name].items():
            assert published.get(field, value) == value, (name, field)


def test_the_usable_part_is_the_planner_s():
    planned = kvq.plan(explorer.MODELS["Llama-3.1-8B"], "L4", 4096, "int8")
    assert explorer.usable_bytes("L4") == planned.usable_bytes
    assert set(explorer.BANDWIDTH) <= set(kvq.MEMORY_GB)


def test_what_cannot_be_shown_is_refused():
    model = real_model()
    with pytest.raises(InvalidArgument, match="no row for fp16"):
        explorer.explorer_data(
            *model, {name: row for name, row in QUALITY.items() if name != "fp16"}
        )
    with pytest.raises(UnsupportedScheme, match="block"):
        explorer._side(kvq.SCHEMES["nvfp4"].keys)
    with pytest.raises(UnsupportedScheme, match="rotate"):
        explorer._side(kvq.SCHEMES["int4-rotated"].keys)


# -- numbers of the script -----------------------------------------------------------

CONTEXTS = (1, 15, 16, 17, 127, 4096, 4871, 131072)
RECENT = (0, 9, 32, 128)


@pytest.mark.browser
def test_bytes_are_the_library_s(show, data):
    page = show()
    found = page.evaluate(
        """([contexts, recents]) => {
          const {data, cacheBytes} = document.querySelector(".kvqx").kvq, all = [];
          for (const scheme of data.schemes) for (const model of data.models)
            for (const context of contexts) for (const recent of recents)
              all.push(cacheBytes(data, {scheme, model, context, recent, batch: 3}));
          return all;
        }""",
        [CONTEXTS, RECENT],
    )
    settings = itertools.product(data["schemes"], data["models"], CONTEXTS, RECENT)
    for bytes_of, (scheme, model, context, recent) in zip(found, settings, strict=True):
        recipe, shape = kvq.scheme(scheme["name"], recent=recent), shape_of(model)
        case = (recipe.name, model["name"], context, recent)
        assert bytes_of["total"] == kvq.kv_bytes(shape, recipe, context, 3), case
        # And so are the parts: a cache without them is smaller by just as much.
        tokens = len(recipe.law(16).sealed(context)) * 16
        bits = recipe.keys.fmt.bits
        assert bytes_of["codes"] == 3 * tokens * shape.elements_per_token * bits / 8, (
            case
        )
        hot = sum(map(len, recipe.law(16).kept_hot(context))) * 16
        assert bytes_of["hot"] == 3 * hot * shape.elements_per_token * 2, case


def choose(page, **settings):
    for name, value in settings.items():
        control = page.locator(f'[data-field="{name}"]').first
        if control.evaluate("e => e.tagName") == "SELECT":
            control.select_option(label=value)
        else:
            control.evaluate(
                "(e, v) => { e.value = v;"
                " e.dispatchEvent(new Event('input', {bubbles: true})); }",
                str(value),
            )


@pytest.mark.browser
@pytest.mark.parametrize(
    ("scheme", "model", "quarter", "batch", "gpu", "weights", "recent"),
    [
        ("int4", "Llama-3.1-8B", 48, 16, "L4", 16, 0),
        ("fp16", "Llama-2-7B", 49, 7, "A100-80GB-SXM", 16, 128),
        ("int2-kivi", "Llama-3.1-70B", 68, 1, "H200", 4, 32),
        ("fp8", "Qwen2.5-7B", 28, 4096, "T4", 8, 0),
        ("int4-kivi", "SmolLM2-135M", 31, 2, "H100-SXM", 16, 128),
        ("int8", "Llama-3.1-70B", 40, 1, "L4", 16, 0),
    ],
)
def test_what_is_shown_is_what_the_library_says(
    show, data, scheme, model, quarter, batch, gpu, weights, recent
):
    page = show()
    choose(
        page,
        scheme=explorer.LABELS[scheme],
        model=model,
        context=quarter,
        batch=batch,
        gpu=gpu,
        weights=str(weights),
        recent=str(recent) if recent else "none but the open page",
    )
    context = round(2 ** (quarter / 4))
    (facts,) = (m for m in data["models"] if m["name"] == model)
    recipe = kvq.scheme(scheme, recent=recent)
    one = kvq.kv_bytes(shape_of(facts), recipe, context)
    shown = page.locator('[data-show="bytes"] tr').last.locator("td")
    assert int(shown.nth(0).get_attribute("data-exact")) == one
    assert int(shown.nth(1).get_attribute("data-exact")) == batch * one
    usable = explorer.usable_bytes(gpu)
    held = -(-facts["parameters"] * weights // 8)
    most = kvq.max_batch(usable, held, 0, one)
    summary = page.locator('[data-show="summary"]')
    assert int(summary.get_attribute("data-most")) == most
    assert f"{context:,} tokens" in summary.inner_text()
    assert ("do not fit" in summary.inner_text()) == (held > usable)
    least = float(page.locator('[data-show="time"]').get_attribute("data-exact"))
    speed = explorer.BANDWIDTH[gpu]
    assert least == pytest.approx(1000 * (held + batch * one) / speed, rel=1e-12)


@pytest.mark.browser
def test_keys_are_decoded_exactly(show, data, heads):
    page = show()
    for i, head in enumerate(heads):
        for j, name in enumerate(explorer.LABELS):
            found = page.evaluate(
                """([i, j]) => {
                  const {data, coldKeys} = document.querySelector(".kvqx").kvq;
                  return [...coldKeys(data.heads[i], data.schemes[j], data.page_size)];
                }""",
                [i, j],
            )
            stored = sealed(head, name).dequantize().flatten(0, 1)
            assert torch.equal(torch.tensor(found).view_as(stored), stored), name


@pytest.mark.browser
@pytest.mark.parametrize("recent", [0, 32])
def test_attention_is_the_library_s(show, data, heads, recent):
    page = show()
    for i, head in enumerate(heads):
        for j, name in enumerate(explorer.LABELS):
            rows = page.evaluate(
                """([i, j, recent]) => {
                  const {data, coldKeys, attention} =
                    document.querySelector(".kvqx").kvq;
                  const head = data.heads[i], size = data.page_size;
                  const keys = coldKeys(head, data.schemes[j], size);
                  return attention(head, keys, recent, size).map((row) => [...row]);
                }""",
                [i, j, recent],
            )
            expected = pattern(head, name, recent=recent)
            for query, row in enumerate(rows):
                theirs = expected[query, : query + 1]
                ours = torch.tensor(row, dtype=torch.float64)
                torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-9)


@pytest.mark.browser
def test_errors_and_sizes_are_the_library_s(show, heads):
    page = show()
    for i, head in enumerate(heads):
        choose(page, head=f"layer {head.layer}, head {head.head}")
        rows = page.locator('[data-show="head-table"] tr')
        for j, name in enumerate(explorer.LABELS):
            z, keys = sealed(head, name), head.keys.double()
            error = (z.dequantize().double().flatten(0, 1) - keys).norm() / keys.norm()
            cells = rows.nth(j).locator("td")
            assert cells.nth(0).text_content() == f"{z.nbytes:,}", (i, name)
            found = [float(cells.nth(n).get_attribute("data-exact")) for n in (1, 2)]
            share = moved(pattern(head), pattern(head, name))
            assert found == pytest.approx([error.item(), share], rel=1e-6, abs=1e-12)


# -- everyone can use it -------------------------------------------------------------

UNNAMED = """() => [...document.querySelectorAll(
    ".kvqx input, .kvqx select, .kvqx canvas, .kvqx svg, .kvqx [role=img],"
    + ".kvqx [role=region], .kvqx section")]
  .filter((e) => ![...(e.labels ?? [])].some((l) => l.innerText.trim())
    && !e.getAttribute("aria-label")?.trim()
    && !document.getElementById(e.getAttribute("aria-labelledby"))?.innerText.trim())
  .map((e) => e.outerHTML.slice(0, 90))"""

DANGLING = """() => [...document.querySelectorAll(
    "[for], [aria-labelledby], [aria-describedby]")]
  .flatMap((e) => ["for", "aria-labelledby", "aria-describedby"].map(
    (name) => e.getAttribute(name)).filter(Boolean))
  .filter((id) => document.querySelectorAll(`[id="${id}"]`).length !== 1)"""


@pytest.mark.browser
def test_every_control_and_picture_has_a_name(show, data):
    page = show(shown=(data, data))
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(DANGLING) == []
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids)) > 20
    tables = page.evaluate(
        """() => [...document.querySelectorAll(".kvqx table")].map((t) => [
          t.querySelectorAll("thead th[scope=col]").length,
          t.querySelectorAll("tbody tr:first-child > *").length,
          t.querySelectorAll("tbody tr").length,
          t.querySelectorAll("tbody th[scope=row]").length])"""
    )
    for columns, cells, rows, headings in tables:
        assert columns == cells > 1 and rows == headings > 1


@pytest.mark.browser
def test_two_explorers_do_not_disturb_each_other(show, data):
    page = show(shown=(data, data))
    page.locator('[data-field="scheme"]').first.select_option(index=5)
    said = page.locator('[data-show="summary"]').all_inner_texts()
    assert said[0].startswith("INT2-KIVI") and said[1].startswith("INT4,")


# Text and what lies behind it, as they are seen; WCAG 2 wants 4.5 to 1.
PALE = """() => {
  const canvas = document.createElement("canvas").getContext("2d",
    {willReadFrequently: true});
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map(
    (i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (e) => {
    if (!e) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(e.parentElement));
  };
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0.05);
  const found = [];
  for (const e of document.querySelectorAll(".kvqx, .kvqx *")) {
    const texts = [...e.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
    if (!texts.length || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName)) continue;
    const style = getComputedStyle(e), below = behind(e);
    const colour = rgba(e.closest("svg") ? style.fill : style.color);
    const pair = [light(over(colour, below)), light(below)].sort((a, b) => b - a);
    found.push([pair[0] / pair[1], e.tagName, texts[0].data.trim().slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
def test_text_stands_out_in_both_themes(show, theme):
    page = show(theme=theme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
    for token in (94, 30):
        choose(page, token=token)
        ratios = page.evaluate(PALE)
        assert len(ratios) > 200
        assert ratios[0][0] >= 4.5, ratios[:3]


@pytest.mark.browser
def test_the_themes_differ(show):
    colours = {
        theme: show(theme=theme)
        .locator(".kvqx")
        .evaluate("e => getComputedStyle(e).backgroundColor")
        for theme in THEMES
    }
    assert colours["light"] != colours["dark"]


@pytest.mark.browser
def test_everything_can_be_done_with_the_keyboard(show):
    page = show()
    reached, before = [], None
    for _ in range(60):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
              return [e.id || e.tagName + e.textContent.slice(0, 20),
                s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2]; }"""
        )
        if at[0].startswith("BODY") or at == before:
            break
        reached.append(at)
        before = at
    names = [name for name, _ in reached]
    controls = page.evaluate(
        "[...document.querySelectorAll('.kvqx :is(input, select)')].map((e) => e.id)"
    )
    assert set(controls) <= set(names)
    assert all(visible for _, visible in reached), reached
    summary = page.locator('[data-show="summary"]')
    for field, key in (("scheme", "ArrowDown"), ("context", "ArrowRight")):
        said = summary.inner_text()
        page.locator(f'[data-field="{field}"]').first.focus()
        page.keyboard.press(key)
        assert summary.inner_text() != said, field
    attention = page.locator('[data-show="attention-summary"]')
    said = attention.inner_text()
    page.locator('[data-field="token"]').focus()
    page.keyboard.press("ArrowLeft")
    assert attention.inner_text() != said
    lively = page.evaluate(
        "[...document.querySelectorAll('[aria-live=polite]')].map(e => e.dataset.show)"
    )
    assert lively == ["attention-summary"]  # only the sentence beside the control


@pytest.mark.browser
def test_all_choices_of_a_scheme_agree(show):
    page = show()
    page.locator('[data-field="scheme"]').last.select_option(
        label="FP8, one scale a page"
    )
    chosen = page.evaluate(
        "[...document.querySelectorAll('[data-field=scheme]')].map((e) => e.value)"
    )
    assert len(chosen) == 3 and len(set(chosen)) == 1
    assert page.locator('[data-show="keys-summary"]').inner_text().startswith("FP8")


@pytest.mark.browser
@pytest.mark.parametrize("typed", ["0", "", "-3", "2.5", "5000"])
def test_a_number_that_makes_no_sense_is_marked(show, typed):
    page = show()
    batch = page.locator('[data-field="batch"]')
    batch.fill("3")
    batch.fill(typed)
    assert batch.get_attribute("aria-invalid") == "true"
    assert "3 sequences" in page.locator('[data-show="summary"]').inner_text()
    batch.fill("5")
    assert batch.get_attribute("aria-invalid") == "false"
    assert "5 sequences" in page.locator('[data-show="summary"]').inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_the_page(show, width):
    page = show(width)
    page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
    size = page.evaluate("document.documentElement.scrollWidth")
    assert size <= width
    canvases = page.evaluate(
        "[...document.querySelectorAll('canvas')]"
        ".map((c) => c.getBoundingClientRect().width)"
    )
    assert len(canvases) == 6 and min(canvases) >= 100


@pytest.mark.browser
def test_a_token_can_be_clicked(show, data):
    page = show()
    page.locator('[data-show="text-before"] [data-token="31"]').click()
    assert (
        data["tokens"][31].strip() in page.locator('[data-show="token"]').inner_text()
    )


@pytest.mark.browser
def test_no_text_can_end_the_script(show, data):
    nasty = ["</script><b>", "<!-- <script>", "&amp;", *data["tokens"][3:]]
    page = show(shown=({**data, "tokens": nasty},))
    assert page.locator('[data-token="0"]').first.text_content() == "</script><b>"
    assert page.locator('[data-token="1"]').first.text_content() == "<!-- <script>"


# -- a text of one's own -------------------------------------------------------------


def test_a_static_page_gets_a_note_and_no_widget(monkeypatch, capsys):
    monkeypatch.setenv(live.STATIC, "1")
    assert live.live(*real_model()) is None
    assert "running kernel" in capsys.readouterr().out
    assert site._environment(Path())[live.STATIC]


def test_look_measures_a_text():
    model, tokenizer = real_model()
    rows = dict(live.look(model, tokenizer, explorer.TEXT, "int4", new_tokens=4).rows)
    found = read_heads(model, tokenizer(explorer.TEXT).input_ids, [explorer.HEADS[0]])
    share = moved(pattern(found[0]), pattern(found[0], "int4"))
    assert rows["attention of this head that moved"] == f"{share:.1%}"
    assert rows["tokens, and full pages"] == "96, 6"
    assert float(rows["KL divergence of the predictions"].split()[0]) > 0.001
    kept = sealed(found[0], "int4").nbytes
    assert rows["bytes of this head's sealed keys"].startswith(f"{kept} ")


def test_the_controls_read_a_text_and_say_what_is_wrong(monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    monkeypatch.delenv(live.STATIC, raising=False)
    asked = []

    def instead(model, tokenizer, text, scheme, head):
        asked.append((text, scheme, head))
        raise InvalidArgument("too short")

    monkeypatch.setattr(live, "look", instead)
    box = live.live(*real_model())
    text, scheme, head, button, _ = box.children
    assert isinstance(box, widgets.VBox)
    text.value, scheme.value, head.value = "A lamp.", "int8", explorer.HEADS[1]
    button.click()  # an InvalidArgument is printed, not raised
    assert asked == [("A lamp.", "int8", explorer.HEADS[1])]
    assert not button.disabled


def test_a_text_that_fills_no_page_is_refused():
    with pytest.raises(InvalidArgument, match="a page has 16"):
        live.look(*real_model(), "Too short.", "int4")
