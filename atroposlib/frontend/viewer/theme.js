// Light or dark: as the system says until it is chosen here.

const KEY = "atropos-theme";

function stored() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

export function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem(KEY, theme); } catch { /* a page without storage forgets */ }
}

if (["light", "dark"].includes(stored())) document.documentElement.dataset.theme = stored();
