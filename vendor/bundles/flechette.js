// Arrow streams, as the log and SQL answer them.
export { tableFromIPC } from "@uwdata/flechette";
