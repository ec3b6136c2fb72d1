// Paper is white: a page in dark colours is light while it is printed.
(() => {
  const page = document.documentElement;
  let theme;
  window.addEventListener("beforeprint", () => {
    theme = page.dataset.theme;
    page.dataset.theme = "light";
  });
  window.addEventListener("afterprint", () => {
    page.dataset.theme = theme;
  });
})();
