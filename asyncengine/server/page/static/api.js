// The server's API: JSON and streams of server-sent events. Addresses are relative, so the page works below any path.

export class ApiError extends Error {
  constructor(message, status, code) {
    Object.assign(super(message), { status, code });
  }
}

let key = "";
export const setKey = (value) => { key = value; };

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const { message, code } = (await response.json().catch(() => null))?.error ?? {};
  throw new ApiError(message ?? `The server answered ${response.status}.`, response.status, code);
}

const post = (path, body, signal) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

export const getJson = async (path, signal) => (await request(path, { signal })).json();
export const postJson = async (path, body) => (await post(path, body)).json();
export const exists = (path) => request(path, { method: "HEAD" }).then(() => true, () => false);

/** Yields the events. Throws ApiError where the server reports one, or where the stream has no end. */
export async function* stream(path, body, signal) {
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 200, event.error.code);
    yield event;
  }
  throw new ApiError("The answer was cut off.", 200);
}

async function* events(body) {
  // Without a stream between: where the connection is cut, that would throw away the event that says why.
  const reader = body.getReader(), decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);  // others are comments: pings
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
