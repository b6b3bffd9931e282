//! Parser of the exporter's text format, so that the status page and Prometheus show the same numbers.

/// Samples of one scrape, without histogram buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<Sample>);

#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Samples {
    /// Parses Prometheus' text format. Skips invalid lines, which the exporter does not write.
    pub fn parse(text: &str) -> Samples {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        Samples(lines.filter_map(Sample::parse).filter(|sample| !sample.name.ends_with("_bucket")).collect())
    }

    /// Sum of a metric over all labels; 0 if it is absent.
    pub fn sum(&self, name: &str) -> f64 {
        self.named(name).map(|sample| sample.value).sum()
    }

    /// First value of a metric, if present.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.named(name).next().map(|sample| sample.value)
    }

    /// Value of the sample with these label values; 0 if it is absent.
    pub fn with(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let matches = |sample: &&Sample| labels.iter().all(|(label, value)| sample.label(label) == Some(value));
        self.named(name).find(matches).map_or(0.0, |sample| sample.value)
    }

    /// Values of a metric by one label, in the order of the scrape.
    pub fn by<'a>(&'a self, name: &str, label: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        self.named(name).filter_map(move |sample| Some((sample.label(label)?, sample.value)))
    }

    /// Values of a metric by three labels.
    pub fn by_three<'a>(
        &'a self,
        name: &str,
        labels: [&'a str; 3],
    ) -> impl Iterator<Item = (&'a str, &'a str, &'a str, f64)> {
        self.named(name).filter_map(move |sample| {
            let [a, b, c] = labels.map(|label| sample.label(label));
            Some((a?, b?, c?, sample.value))
        })
    }

    fn named(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }
}

impl Sample {
    fn parse(line: &str) -> Option<Sample> {
        let (head, value) = line.rsplit_once(' ')?;
        let value = value.parse().ok()?;
        let Some((name, rest)) = head.split_once('{') else {
            return Some(Sample { name: head.to_owned(), labels: Vec::new(), value });
        };
        Some(Sample { name: name.to_owned(), labels: labels(rest.strip_suffix('}')?)?, value })
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

/// Parses `a="b",c="d"` with the format's escapes (`\\`, `\"`, `\n`).
fn labels(text: &str) -> Option<Vec<(String, String)>> {
    let mut labels = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.chars();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => match chars.next()? {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                other => value.push(other),
            }
        }
        labels.push((label.to_owned(), value));
        rest = chars.as_str();
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    Some(labels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::recorder;
    use metrics::{counter, gauge, histogram, with_local_recorder};
    use proptest::prelude::*;

    #[test]
    fn rendered_metrics_parse_back() {
        let recorder = recorder(&[("seconds", &[0.1, 1.0])]).unwrap();
        with_local_recorder(&recorder, || {
            gauge!("plain").set(-2.5);
            gauge!("not_finite").set(f64::NAN);
            counter!("jobs_total", "outcome" => "trained").increment(3);
            counter!("jobs_total", "outcome" => "skipped").increment(4);
            histogram!("seconds", "actor" => "target", "index" => "1", "cause" => "pool_full").record(0.5);
            histogram!("seconds", "actor" => "target", "index" => "1", "cause" => "pool_full").record(2.0);
        });
        let samples = Samples::parse(&recorder.handle().render());
        assert_eq!((samples.get("plain"), samples.get("absent"), samples.sum("absent")), (Some(-2.5), None, 0.0));
        assert!(samples.get("not_finite").unwrap().is_nan());
        assert_eq!(samples.sum("jobs_total"), 7.0);
        assert_eq!(samples.with("jobs_total", &[("outcome", "skipped")]), 4.0);
        assert_eq!(samples.by("jobs_total", "outcome").count(), 2);
        let sums: Vec<_> = samples.by_three("seconds_sum", ["actor", "index", "cause"]).collect();
        assert_eq!(sums, [("target", "1", "pool_full", 2.5)]);
        assert_eq!((samples.sum("seconds_count"), samples.sum("seconds_bucket")), (2.0, 0.0));
    }

    proptest! {
        /// Excludes backslashes: the exporter leaves some of them unescaped.
        #[test]
        fn any_label_parses_back(value in "[^\\\\\\pC]{0,12}", other in "[a-z\"\n,={} ]{0,12}") {
            let recorder = recorder(&[]).unwrap();
            with_local_recorder(&recorder, || {
                gauge!("g", "one" => value.clone(), "two" => other.clone()).set(7.0);
            });
            let samples = Samples::parse(&recorder.handle().render());
            prop_assert_eq!(samples.with("g", &[("one", &value), ("two", &other)]), 7.0);
        }

        #[test]
        fn no_text_panics(text in "[a-z{}=\",\\\\ 0-9.\n#]{0,60}") {
            Samples::parse(&text);
        }
    }
}
