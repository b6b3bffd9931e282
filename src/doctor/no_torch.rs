//! What stands in for the look at devices in a build without libtorch: a sentence.

use super::Report;

/// Says so.
pub fn examine(report: &mut Report) {
    report.warn(
        "libtorch",
        "this draftmill was built without libtorch, so no device was tried, and only run.engine = \"simulated\" runs",
        "build with the default features",
    );
}
