// A picture that goes along with a message: read and checked once, then a data: URL with a name and a size.

const MAX_BYTES = 10 * 1024 * 1024; // two of them, as base64, fit into a request
const MEGABYTE = 1024 * 1024;
const LONGEST_SHOWN = 120; // characters of a URL, in code that is shown
const SIGNATURES = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/webp", /^RIFF[^]{4}WEBP/],
];

export const KINDS = SIGNATURES.map(([kind]) => kind);

/** Return {name, url, width, height} of a file. Raises Error with what is wrong and what can be done. */
export async function readPicture(file) {
  const name = file.name || "picture";
  const megabytes = (file.size / MEGABYTE).toFixed(1);
  if (file.size > MAX_BYTES) throw new Error(`${name} has ${megabytes} MB; the limit is 10 MB. Make it smaller.`);
  const kind = await kindOf(file);
  if (!kind) throw new Error(`${name} is not a PNG, JPEG or WebP picture. Convert it to one of these.`);
  const blob = new Blob([file], { type: kind }); // whatever the file's name says
  const { width, height } = await sizeOf(blob, name);
  return { name, url: await dataUrl(blob, name), width, height };
}

/** Return the content of a user's message: its text, or the pictures and then the text, as models are trained on. */
export function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/** Return a request with its long data: URLs cut, to be looked at; null when it has none. */
export function shortened(request) {
  let isCut = false;
  const part = (one) => {
    const url = one.image_url?.url ?? one.image_url ?? "";
    if (url.length <= LONGEST_SHOWN) return one;
    isCut = true;
    const cut = `${url.slice(0, 48)}... (${url.length} characters)`;
    return { ...one, image_url: one.image_url.url ? { url: cut } : cut };
  };
  const name = "input" in request ? "input" : "messages";
  const messages = request[name].map((message) =>
    Array.isArray(message.content) ? { ...message, content: message.content.map(part) } : message,
  );
  return isCut ? { ...request, [name]: messages } : null;
}

async function kindOf(file) {
  const head = await bytesOf(file.slice(0, 16), file.name);
  const letters = String.fromCharCode(...head);
  return SIGNATURES.find(([, signature]) => signature.test(letters))?.[0] ?? null;
}

async function bytesOf(blob, name) {
  try {
    return new Uint8Array(await blob.arrayBuffer());
  } catch {
    throw new Error(`${name} can't be read. Was it moved, or is it a folder?`);
  }
}

async function sizeOf(blob, name) {
  try {
    const bitmap = await createImageBitmap(blob);
    const { width, height } = bitmap;
    bitmap.close();
    return { width, height };
  } catch {
    throw new Error(`${name} is damaged: the browser can't show it. Attach another file.`);
  }
}

function dataUrl(blob, name) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${name} can't be read. Was it moved?`));
    reader.readAsDataURL(blob);
  });
}
