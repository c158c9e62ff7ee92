// Which words of two texts are not common to both, in order (longest common subsequence).

const MOST = 1500; // words of each that are compared; what follows is shown as it is

export function changedWords(left, right) {
  const a = left.match(/\s*\S+/g) ?? [], b = right.match(/\s*\S+/g) ?? [];
  const n = Math.min(a.length, MOST), m = Math.min(b.length, MOST);
  const same = (i, j) => a[i].trim() === b[j].trim();
  const rows = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) rows[i][j] = same(i, j) ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
  const found = [[], []];
  let i = 0, j = 0;
  while (i < n || j < m) {
    if (i < n && j < m && same(i, j)) {
      found[0].push([a[i++], false]);
      found[1].push([b[j++], false]);
    } else if (j >= m || (i < n && rows[i + 1][j] >= rows[i][j + 1])) found[0].push([a[i++], true]);
    else found[1].push([b[j++], true]);
  }
  if (n < a.length) found[0].push([a.slice(n).join(""), false]);
  if (m < b.length) found[1].push([b.slice(m).join(""), false]);
  return found;
}
