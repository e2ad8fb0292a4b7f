// What the page remembers. Browsers may forbid it or be full: then it forgets, and goes on.

/** Return the stored JSON, or the fallback. */
export function recall(name, fallback, storage = localStorageOrNull()) {
  try {
    return JSON.parse(storage.getItem(`bireme.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Store a value as JSON; null forgets it. Return whether it could be done. */
export function remember(name, value, storage = localStorageOrNull()) {
  try {
    if (value === null) storage.removeItem(`bireme.${name}`);
    else storage.setItem(`bireme.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden
  }
}

/** Where things last as long as the tab. */
export function tabStorage() {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}

function localStorageOrNull() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}
