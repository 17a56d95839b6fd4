// Where the nodes of a graph go.
import dagre from "@dagrejs/dagre";

export const { Graph } = dagre.graphlib;
export const { layout } = dagre;
