// The view: components, templates without a build step, signals.
export { Fragment, h, render } from "preact";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { html } from "htm/preact";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "@preact/signals";
