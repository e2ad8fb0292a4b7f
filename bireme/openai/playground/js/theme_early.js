// Sets the chosen theme before the first paint; a plain script, because modules run after it.
try {
  const theme = JSON.parse(localStorage.getItem("bireme.theme"));
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // the system's theme, then
}
