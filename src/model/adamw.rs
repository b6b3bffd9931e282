//! AdamW on fp32 master weights: decoupled weight decay, bias correction and clipping by the global norm. With Muon, the
//! matrices are Muon's and AdamW updates the rest.

use super::{
    ModelError,
    muon::{Muon, is_matrix},
    params::{Gradient, ParamSet},
};
use draftmill_torch_ext::{PendingScalar, Update};
use tch::Tensor;

/// Hyperparameters of AdamW except the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decoupled weight decay, applied to every parameter including norms.
    pub weight_decay: f64,
}

/// Optimizer state: master weights and moments, in fp32 on one device. Weights and first moments have the same names and
/// shapes. Second moments have the same too, without the matrices of Muon, whose first moment is its momentum.
pub struct AdamW {
    pub masters: ParamSet,
    /// Running mean of the gradient.
    pub exp_avg: ParamSet,
    /// Running mean of the squared gradient.
    pub exp_avg_sq: ParamSet,
    /// Number of updates so far.
    pub steps: u64,
    hyper: Hyper,
    muon: Option<Muon>,
    /// Disables the fused kernel.
    unfused: bool,
}

impl AdamW {
    /// Creates the state with zero moments.
    ///
    /// # Errors
    /// Returns an error if libtorch cannot allocate the moments.
    pub fn new(masters: ParamSet, hyper: Hyper) -> Result<AdamW, ModelError> {
        let (exp_avg, exp_avg_sq) = (masters.zeros_like()?, masters.zeros_like()?);
        Ok(AdamW { masters, exp_avg, exp_avg_sq, steps: 0, hyper, muon: None, unfused: false })
    }

    /// Restores the state of a checkpoint.
    pub fn resume(masters: ParamSet, exp_avg: ParamSet, exp_avg_sq: ParamSet, steps: u64, hyper: Hyper) -> AdamW {
        AdamW { masters, exp_avg, exp_avg_sq, steps, hyper, muon: None, unfused: false }
    }

    /// Leaves matrices to Muon. Second moments of matrices are dropped.
    ///
    /// # Errors
    /// `ModelError::Input` if a second moment of another tensor is absent.
    pub fn with_muon(mut self, muon: Option<Muon>) -> Result<AdamW, ModelError> {
        self.muon = muon;
        let expected = self.masters.iter().filter(|(name, x)| !self.is_muons(name, x)).map(|(name, _)| name);
        let expected: Vec<&str> = expected.collect();
        if let Some(name) = expected.iter().find(|name| self.exp_avg_sq.get(name).is_none()) {
            return Err(ModelError::Input(format!(
                "the second moment of `{name}` is absent: these moments are of a run with another optimizer.kind"
            )));
        }
        if expected.len() < self.exp_avg_sq.len() {
            let kept = self.exp_avg_sq.iter().filter(|(name, _)| expected.contains(name));
            self.exp_avg_sq = ParamSet::new(kept.map(|(name, x)| (name.to_owned(), x.copy())).collect());
        }
        Ok(self)
    }

    fn is_muons(&self, name: &str, tensor: &Tensor) -> bool {
        self.muon.is_some() && is_matrix(name, &tensor.size())
    }

    /// Sets the weight decay of the next and later steps.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.hyper.weight_decay = weight_decay;
    }

    /// Divides the gradient by `denominator`, clips it to a global L2 norm of at most `max_norm` and updates the
    /// weights. Clipping multiplies by `min(1, max_norm / (norm + 1e-6))`, as torch does. Returns the norm before
    /// clipping. The gradient's storage is used as scratch.
    ///
    /// # Errors
    /// `ModelError::Input` if parameter names differ, or if the norm or its clip factor is not finite; the weights then
    /// stay unchanged. Otherwise if libtorch fails.
    pub fn step(
        &mut self,
        mut gradient: Gradient,
        denominator: f64,
        lr: f64,
        max_norm: f64,
    ) -> Result<f64, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if gradient.names() != self.masters.names() {
            return Err(ModelError::Input("the gradient's parameter names differ from the optimizer's".into()));
        }
        let update = self.update(lr, denominator, max_norm);
        let norm = draftmill_torch_ext::norm(gradient.tensors())?;
        // Start the device-to-host copy now, so that the device computes the update while the host waits for the norm.
        let pending = PendingScalar::start(&norm);
        let fused = !self.unfused && self.fused_update(&mut gradient, &norm, &update)?;
        let norm = pending.value()?;
        // The fused kernel made the same check on the device and changed nothing.
        if !update.is_applicable(norm) {
            let norm = norm / denominator;
            return Err(ModelError::Input(format!(
                "the gradient's norm is {norm}, so the weights stay unchanged; lower optimizer.learning_rate, or train in f32"
            )));
        }
        if !fused {
            self.unfused_update(&gradient, norm, &update)?;
        }
        self.muon_update(&gradient, norm, &update)?;
        self.steps = update.step;
        Ok(norm / denominator)
    }

    /// Disables the fused kernel: every update uses plain operations, the reference for the kernel.
    pub fn unfused(mut self) -> AdamW {
        self.unfused = true;
        self
    }

    /// Parameters of the next update. Mean and clip share one divisor, so the gradient is read only once.
    fn update(&self, learning_rate: f64, denominator: f64, max_norm: f64) -> Update {
        let Hyper { beta1, beta2, eps, weight_decay } = self.hyper;
        Update { learning_rate, beta1, beta2, eps, weight_decay, step: self.steps + 1, denominator, max_norm }
    }

    /// Updates with libtorch's fused kernel. Returns false if the kernel does not support these tensors; nothing is
    /// changed then.
    fn fused_update(&mut self, gradient: &mut Gradient, norm: &Tensor, update: &Update) -> Result<bool, ModelError> {
        let own = self.positions(false);
        let part = |set: &ParamSet| own.iter().map(|&index| set.tensors()[index].shallow_clone()).collect::<Vec<_>>();
        let (mut masters, mut m, mut g) = (part(&self.masters), part(&self.exp_avg), part(gradient));
        let v = self.exp_avg_sq.tensors_mut();
        match draftmill_torch_ext::fused_adamw(&mut masters, &mut g, &mut m, v, norm, update) {
            Ok(()) => Ok(true),
            Err(draftmill_torch_ext::Error::Unsuitable(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Positions of the tensors that Muon updates, or of those that AdamW updates.
    fn positions(&self, of_muon: bool) -> Vec<usize> {
        let all = self.masters.iter().enumerate();
        all.filter(|(_, (name, x))| self.is_muons(name, x) == of_muon).map(|(index, _)| index).collect()
    }

    /// Updates the matrices, if Muon is on. The gradient is divided and clipped like that of AdamW.
    fn muon_update(&mut self, gradient: &Gradient, norm: f64, update: &Update) -> Result<(), ModelError> {
        let Some(muon) = self.muon else { return Ok(()) };
        let divisor = update.divisor(norm);
        for index in self.positions(true) {
            let (weight, momentum) = (&mut self.masters.tensors_mut()[index], &mut self.exp_avg.tensors_mut()[index]);
            muon.update(weight, momentum, &gradient.tensors()[index].f_div_scalar(divisor)?, update.learning_rate)?;
        }
        Ok(())
    }

    /// Updates with plain operations on any device and dtype.
    fn unfused_update(&mut self, gradient: &Gradient, norm: f64, update: &Update) -> Result<(), ModelError> {
        let Update { learning_rate: lr, beta1, beta2, eps, weight_decay, step, .. } = *update;
        let divisor = update.divisor(norm);
        let exponent = i32::try_from(step).unwrap_or(i32::MAX);
        let (correction1, correction2) = (1.0 - beta1.powi(exponent), 1.0 - beta2.powi(exponent));
        for (index, v) in self.positions(false).into_iter().zip(self.exp_avg_sq.tensors_mut()) {
            let (master, m) = (&mut self.masters.tensors_mut()[index], &mut self.exp_avg.tensors_mut()[index]);
            let g = gradient.tensors()[index].f_div_scalar(divisor)?;
            if weight_decay != 0.0 {
                let _ = master.f_mul_scalar_(1.0 - lr * weight_decay)?;
            }
            let _ = m.f_lerp_(&g, 1.0 - beta1)?;
            let _ = v.f_mul_scalar_(beta2)?;
            let _ = v.f_addcmul_(&g.f_mul_scalar(1.0 - beta2)?, &g)?;
            let root = v.f_sqrt()?.f_div_scalar(correction2.sqrt())?.f_add_scalar(eps)?;
            let _ = master.f_addcdiv_(&m.f_mul_scalar(-lr / correction1)?, &root)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use tch::Kind;

    const HYPER: Hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };

    /// Creates values between -1 and 1.
    fn set(rng: &mut ChaCha8Rng, shapes: &[Vec<i64>], kind: Kind) -> ParamSet {
        let tensors = shapes.iter().map(|shape| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
            Tensor::from_slice(&values).reshape(shape).to_kind(kind)
        });
        ParamSet::new(tensors.enumerate().map(|(i, t)| (format!("p{i:02}"), t)).collect())
    }

    fn copy(set: &ParamSet) -> ParamSet {
        ParamSet::new(set.iter().map(|(name, t)| (name.to_owned(), t.copy())).collect())
    }

    /// Sorted absolute differences of all values.
    fn gaps(a: &ParamSet, b: &ParamSet) -> Vec<f64> {
        let gaps = a
            .tensors()
            .iter()
            .zip(b.tensors())
            .flat_map(|(a, b)| Vec::<f64>::try_from((a - b).abs().to_kind(Kind::Double).flatten(0, -1)).unwrap());
        let mut gaps: Vec<f64> = gaps.collect();
        gaps.sort_by(f64::total_cmp);
        gaps
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// The limits are those of the golden README.
        #[test]
        fn fused_and_unfused_updates_agree_over_twenty_steps(
            shapes in prop::collection::vec(prop::collection::vec(0i64..20, 0..4), 1..6),
            seed: u64,
            weight_decay in prop_oneof![Just(0.0), 0.001..0.5],
            max_norm in 0.05..50.0,
            denominator in 1.0..5000.0,
        ) {
            let rng = &mut ChaCha8Rng::seed_from_u64(seed);
            let hyper = Hyper { weight_decay, ..HYPER };
            let masters = set(rng, &shapes, Kind::Float);
            let mut fused = AdamW::new(copy(&masters), hyper).unwrap();
            let mut plain = AdamW::new(masters, hyper).unwrap().unfused();
            for step in 1..=20 {
                let gradient = set(rng, &shapes, Kind::Float);
                let norms = [
                    fused.step(copy(&gradient), denominator, 1e-3, max_norm).unwrap(),
                    plain.step(gradient, denominator, 1e-3, max_norm).unwrap(),
                ];
                prop_assert_eq!(norms[0], norms[1]);
                prop_assert_eq!((fused.steps, plain.steps), (step, step));
            }
            let apart = gaps(&fused.masters, &plain.masters);
            let p999 = apart.get(apart.len() * 999 / 1000).copied().unwrap_or(0.0);
            let max = apart.last().copied().unwrap_or(0.0);
            prop_assert!(p999 <= 1e-6 && max <= 5e-4, "masters: p99.9 {:e}, max {:e}", p999, max);
            // If gradients cancel, a moment is smaller than its rounding error.
            let unit: f64 = 1e-6 / denominator;
            for (what, a, b, unit) in [
                ("first moments", &fused.exp_avg, &plain.exp_avg, unit),
                ("second moments", &fused.exp_avg_sq, &plain.exp_avg_sq, unit / denominator),
            ] {
                let largest = gaps(b, &b.zeros_like().unwrap()).last().copied().unwrap_or(0.0);
                let max = gaps(a, b).last().copied().unwrap_or(0.0);
                prop_assert!(max <= 1e-5 * largest + unit, "{}: {:e} of {:e}", what, max, largest);
            }
        }
    }

    /// Checks each result of `fused_update`, so that neither path can replace the other unnoticed.
    #[test]
    fn only_f32_is_updated_by_the_fused_kernel() {
        let (rng, shapes) = (&mut ChaCha8Rng::seed_from_u64(1), [vec![4, 3], vec![5]]);
        for (kind, expected) in [(Kind::Float, true), (Kind::Double, false), (Kind::BFloat16, false)] {
            let masters = set(rng, &shapes, kind);
            let zeros = || ParamSet::new(masters.iter().map(|(name, t)| (name.to_owned(), t.zeros_like())).collect());
            let (m, v) = (zeros(), zeros());
            let mut adamw = AdamW::resume(masters, m, v, 0, HYPER);
            let before = copy(&adamw.masters);
            let mut gradient = set(rng, &shapes, kind);
            let update = adamw.update(0.1, 2.0, 1.0);
            assert_eq!(adamw.fused_update(&mut gradient, &Tensor::from(1f64), &update).unwrap(), expected, "{kind:?}");
            assert_eq!(gaps(&before, &adamw.masters).last().is_some_and(|&gap| gap > 1e-3), expected, "{kind:?}");
            // Tensors that the kernel does not support are still updated.
            adamw.step(set(rng, &shapes, kind), 1.0, 0.1, 1.0).unwrap();
            assert!(gaps(&before, &adamw.masters).iter().all(|&gap| gap > 1e-3), "{kind:?}");
        }
    }

    #[test]
    fn norm_that_is_not_finite_changes_nothing() {
        let (rng, shapes) = (&mut ChaCha8Rng::seed_from_u64(2), [vec![3, 3], vec![2]]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut adamw = AdamW::new(set(rng, &shapes, Kind::Float), HYPER).unwrap();
            let before = copy(&adamw.masters);
            let mut gradient = set(rng, &shapes, Kind::Float);
            let _ = gradient.tensors_mut()[1].get(0).fill_(f64::from(bad));
            let error = adamw.step(gradient, 1.0, 0.1, 1.0).unwrap_err();
            assert!(error.to_string().contains("optimizer.learning_rate"), "{error}");
            let moved = [gaps(&before, &adamw.masters), gaps(&adamw.exp_avg, &adamw.masters.zeros_like().unwrap())];
            assert!(moved.iter().flatten().all(|&gap| gap == 0.0));
            assert_eq!(adamw.steps, 0);
        }
    }
}
