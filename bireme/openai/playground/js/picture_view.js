// A picture on the page, small or as large as a conversation takes it.

import { button, element } from "./dom.js";

const THUMBNAIL_PX = [72, 72];
const SHOWN_PX = [360, 280];

/** Return the picture as it is shown in the conversation. */
export function pictureImage(picture, [maxWidth, maxHeight] = SHOWN_PX) {
  const { name, url, width, height } = picture;
  const scale = Math.min(1, maxWidth / width, maxHeight / height);
  const size = { width: Math.ceil(width * scale), height: Math.ceil(height * scale) };
  return element("img", { class: "picture", src: url, alt: `Attached picture: ${name}`, title: name, ...size });
}

/** Return a thumbnail with a button that removes it. */
export function thumbnail(picture, onRemove) {
  const remove = button("close", `Remove picture: ${picture.name}`, onRemove, { class: "button icon-only remove" });
  return element("li", { class: "thumbnail" }, pictureImage(picture, THUMBNAIL_PX), remove);
}
