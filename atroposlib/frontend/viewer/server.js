// Questions to the server that this page came from.

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) if (value !== "" && value !== undefined && value !== null) query.set(name, value);
  const reply = await fetch(`${path}?${query}`);
  if (!reply.ok) {
    const said = await reply.text();
    let detail = said;
    try { detail = JSON.parse(said).detail ?? said; } catch { /* plain text */ }
    throw new Error(detail || reply.statusText);
  }
  return reply.headers.get("content-type").startsWith("application/json") ? reply.json() : reply.text();
}
