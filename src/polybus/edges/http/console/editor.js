// The SQL editor, loaded when it is first used. It lives in a shadow root: there its styles need no inline style, which
// the page forbids.

/** Put an editor into a box: {set, complete, focus, destroy}. `text` is asked once the code is here. */
export async function editor(box, { text, change, run }) {
  const cm = await import("./vendor/codemirror.js");
  const root = box.shadowRoot ?? box.attachShadow({ mode: "open", delegatesFocus: true });
  const language = new cm.Compartment();
  const view = new cm.EditorView({
    root,
    parent: root,
    state: cm.EditorState.create({
      doc: text(),
      extensions: [
        cm.history(),
        cm.bracketMatching(),
        cm.closeBrackets(),
        cm.autocompletion(),
        language.of(cm.sql({ dialect: cm.PostgreSQL })),
        cm.syntaxHighlighting(highlights(cm)),
        cm.placeholder("SELECT …"),
        cm.EditorView.lineWrapping,
        cm.EditorView.contentAttributes.of({ "aria-label": "SQL query" }),
        cm.EditorView.updateListener.of((update) => update.docChanged && change(update.state.doc.toString())),
        cm.Prec.highest(cm.keymap.of([{ key: "Mod-Enter", run: () => (run(), true) }])),
        cm.keymap.of([...cm.closeBracketsKeymap, ...cm.completionKeymap, ...cm.defaultKeymap, ...cm.historyKeymap]),
        look(cm),
      ],
    }),
  });
  return {
    set(next) {
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: next } });
      view.focus();
    },
    complete(names) {
      const schema = Object.fromEntries([...names.topics, ...names.tables].map((one) => [one.name, one.columns.map((column) => column.name ?? column)]));
      view.dispatch({ effects: language.reconfigure(cm.sql({ dialect: cm.PostgreSQL, schema, upperCaseKeywords: true })) });
    },
    focus: () => view.focus(),
    destroy: () => view.destroy(),
  };
}

function highlights({ HighlightStyle, tags }) {
  return HighlightStyle.define([
    { tag: tags.keyword, color: "var(--accent)", fontWeight: "600" },
    { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
    { tag: [tags.number, tags.bool, tags.null], color: "var(--warn)" },
    { tag: tags.comment, color: "var(--dim)", fontStyle: "italic" },
    { tag: tags.typeName, color: "var(--s6)" },
  ]);
}

function look({ EditorView }) {
  return EditorView.theme({
    "&": { fontSize: "13px", minHeight: "130px" },
    "&.cm-focused": { outline: "none" },
    ".cm-content": { fontFamily: "var(--mono)", padding: "12px 0", caretColor: "var(--text)", minHeight: "130px" },
    ".cm-line": { padding: "0 14px" },
    ".cm-scroller": { lineHeight: "1.6", maxHeight: "320px" },
    "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, ::selection": { background: "var(--accent-soft)" },
    ".cm-placeholder": { color: "var(--dim)" },
    ".cm-tooltip": { background: "var(--surface)", border: "1px solid var(--line)", borderRadius: "8px", overflow: "hidden", color: "var(--text)" },
    ".cm-tooltip-autocomplete > ul > li": { padding: "3px 10px", fontFamily: "var(--mono)" },
    ".cm-tooltip-autocomplete > ul > li[aria-selected]": { background: "var(--accent-soft)", color: "var(--accent)" },
  });
}
