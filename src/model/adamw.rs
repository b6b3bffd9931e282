//! AdamW on fp32 masters: decoupled weight decay, bias correction, and a clip by the global norm.

use super::{ModelError, params::ParamSet};
use tch::Tensor;

/// What shapes an update, the learning rate aside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decoupled; applies to every parameter, norms included.
    pub weight_decay: f64,
}

/// Masters and moments. All three sets have the same names and shapes, in fp32 on one device.
pub struct AdamW {
    pub masters: ParamSet,
    /// Running mean of the gradient.
    pub exp_avg: ParamSet,
    /// Running mean of its square.
    pub exp_avg_sq: ParamSet,
    /// Updates so far.
    pub steps: u64,
    hyper: Hyper,
}

impl AdamW {
    /// Starts with zero moments.
    pub fn new(masters: ParamSet, hyper: Hyper) -> Result<AdamW, ModelError> {
        let (exp_avg, exp_avg_sq) = (masters.zeros_like()?, masters.zeros_like()?);
        Ok(AdamW { masters, exp_avg, exp_avg_sq, steps: 0, hyper })
    }

    /// Goes on where a checkpoint ended.
    pub fn resume(masters: ParamSet, exp_avg: ParamSet, exp_avg_sq: ParamSet, steps: u64, hyper: Hyper) -> AdamW {
        AdamW { masters, exp_avg, exp_avg_sq, steps, hyper }
    }

    /// From the next step on.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        self.hyper.weight_decay = weight_decay;
    }

    /// Divides the gradient by `denominator`, scales it to a global L2 norm of at most `max_norm` (by
    /// `min(1, max_norm / (norm + 1e-6))`, as torch does), and updates. Returns the norm before clipping.
    ///
    /// A norm that is not finite changes nothing and is an error.
    pub fn step(&mut self, gradient: &ParamSet, denominator: f64, lr: f64, max_norm: f64) -> Result<f64, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if gradient.names() != self.masters.names() {
            return Err(ModelError::Input("the gradient has other parameters than the optimizer".into()));
        }
        let norms = gradient.tensors().iter().map(Tensor::f_norm).collect::<Result<Vec<_>, _>>()?;
        let norm = Tensor::f_stack(&norms, 0)?.f_norm()?.f_double_value(&[])? / denominator;
        if !norm.is_finite() {
            return Err(ModelError::Input(format!(
                "the gradient's norm is {norm}; the weights were left as they are. Lower optimizer.learning_rate, or train in f32"
            )));
        }
        let scale = (max_norm / (norm + 1e-6)).min(1.0) / denominator;
        self.steps += 1;
        let Hyper { beta1, beta2, eps, weight_decay } = self.hyper;
        let exponent = i32::try_from(self.steps).unwrap_or(i32::MAX);
        let (correction1, correction2) = (1.0 - beta1.powi(exponent), 1.0 - beta2.powi(exponent));
        let moments = self.exp_avg.tensors_mut().iter_mut().zip(self.exp_avg_sq.tensors_mut());
        for ((master, gradient), (m, v)) in self.masters.tensors_mut().iter_mut().zip(gradient.tensors()).zip(moments) {
            let g = gradient.f_mul_scalar(scale)?;
            if weight_decay != 0.0 {
                let _ = master.f_mul_scalar_(1.0 - lr * weight_decay)?;
            }
            let _ = m.f_lerp_(&g, 1.0 - beta1)?;
            let _ = v.f_mul_scalar_(beta2)?;
            let _ = v.f_addcmul_(&g.f_mul_scalar(1.0 - beta2)?, &g)?;
            let root = v.f_sqrt()?.f_div_scalar(correction2.sqrt())?.f_add_scalar(eps)?;
            let _ = master.f_addcdiv_(&m.f_mul_scalar(-lr / correction1)?, &root)?;
        }
        Ok(norm)
    }
}
