//! SVG with two bar charts of a report: acceptance by position, and the histogram of tokens per step.

use super::stats::Report;
use std::fmt::Write;

const HEIGHT: f64 = 180.0;
const BAR: f64 = 34.0;
const LEFT: f64 = 24.0;
const TOP: f64 = 60.0;
/// Title of the first chart.
const ACCEPTED: &str = "fraction of steps that accept the first k drafts";

/// Draws acceptance by position next to the histogram of tokens per step.
pub fn svg(report: &Report) -> String {
    let all = &report.all;
    let accepted: Vec<f64> = all.acceptance_by_position.iter().map(|fraction| fraction.unwrap_or(0.0)).collect();
    let total = all.tokens_per_step.iter().sum::<usize>().max(1) as f64;
    let steps: Vec<f64> = all.tokens_per_step.iter().map(|&steps| steps as f64 / total).collect();
    let second = LEFT + BAR * accepted.len().max(5) as f64 + 40.0;
    let width = second + BAR * steps.len().max(5) as f64 + LEFT;
    let height = TOP + HEIGHT + 50.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let title = format!(
        "{}: {} tokens per step ({} predicted), {} responses",
        report.draft,
        all.acceptance_pooled.map_or("-".into(), |value| format!("{value:.2}")),
        all.predicted_acceptance.map_or("-".into(), |value| format!("{value:.2}")),
        all.responses
    );
    text(&mut svg, LEFT, 20.0, "start", &title);
    chart(&mut svg, LEFT, ACCEPTED, "#3b6ea5", &accepted);
    chart(&mut svg, second, "fraction of steps that produce k tokens", "#a5643b", &steps);
    svg.push_str("</svg>\n");
    svg
}

/// True for the first bytes of a plot that [`svg`] has drawn.
pub fn is_plot(head: &[u8]) -> bool {
    let text = String::from_utf8_lossy(head);
    text.starts_with("<svg xmlns=") && text.contains(ACCEPTED)
}

fn chart(svg: &mut String, left: f64, title: &str, color: &str, values: &[f64]) {
    text(svg, left, 40.0, "start", title);
    for (at, value) in values.iter().enumerate() {
        let (x, tall) = (left + BAR * at as f64, HEIGHT * value.clamp(0.0, 1.0));
        let y = TOP + HEIGHT - tall;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{color}\"/>",
            BAR - 6.0
        );
        let middle = x + (BAR - 6.0) / 2.0;
        text(svg, middle, y - 4.0, "middle", &format!("{:.0} %", 100.0 * value));
        text(svg, middle, TOP + HEIGHT + 16.0, "middle", &(at + 1).to_string());
    }
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    // Writing to a String cannot fail.
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}
