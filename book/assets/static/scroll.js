// A box that scrolls sideways says so: its edge fades towards what is hidden (book.css),
// and to listeners it is a region with a name, since the theme lets keys reach it.
(() => {
  const BOXES = ".cell_output > .output, .pst-scrollable-table-container, pre";
  const boxes = [...document.querySelectorAll(BOXES)].filter((b) => !b.closest("[hidden]"));
  const names = new Map();

  const name = (box) => {
    const what = box.querySelector("table") ? "Table" : "Text";
    const heading = box.closest("section")?.querySelector("h1, h2, h3, h4");
    const where = (heading?.firstChild?.textContent ?? document.title).trim();
    const same = [...names.values()].filter((n) => n.what === what && n.where === where);
    if (!names.has(box)) names.set(box, { what, where, number: same.length + 1 });
    const { number } = names.get(box);
    return `${what}${number > 1 ? ` ${number}` : ""} in ${where}, scrolls sideways`;
  };

  const show = (box) => {
    const hidden = box.scrollWidth - box.clientWidth;
    const more = [];
    if (box.scrollLeft > 1) more.push("left");
    if (hidden - box.scrollLeft > 1) more.push("right");
    if (hidden > 1) {
      box.dataset.more = more.join(" ");
      // Code is no landmark: a page has dozens.
      box.setAttribute("role", box.tagName === "PRE" ? "group" : "region");
      box.setAttribute("aria-label", name(box));
    } else if ("more" in box.dataset) {
      delete box.dataset.more;
      box.removeAttribute("role");
      box.removeAttribute("aria-label");
    }
  };

  const sizes = new ResizeObserver((entries) => {
    const seen = new Set(entries.map((e) => e.target.closest(BOXES)).filter(Boolean));
    seen.forEach(show);
  });
  for (const box of boxes) {
    sizes.observe(box);
    box.querySelectorAll("table").forEach((table) => sizes.observe(table));
    box.addEventListener("scroll", () => show(box), { passive: true });
  }
})();
