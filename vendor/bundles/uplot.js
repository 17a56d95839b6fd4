// Charts over time.
export { default } from "uplot";
